#include "serving/message.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "serving/include/sparsekit_serving.h"

namespace {

thread_local char message[8192] = "";

}  // namespace

namespace sparsekit::serving {

int fail(int status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(message, sizeof message, format, values);
  va_end(values);
  return status;
}

int fail_of_system(const char* path, const char* what) {
  // std::strerror is thread-safe in glibc and musl, which keep a buffer for each thread.
  return fail(SK_IO_ERROR, "%s: cannot %s: %s", path, what, std::strerror(errno));
}

}  // namespace sparsekit::serving

const char* sk_message(void) {
  return message;
}

int sk_abi_version(void) {
  return SK_ABI_VERSION;
}
