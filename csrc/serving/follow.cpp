// The functions of the C interface that bring a snapshot to newer versions.
#include "serving/handle.h"
#include "serving/include/sparsekit_serving.h"
#include "serving/message.h"

using sparsekit::serving::fail;

int sk_follow(sk_snapshot* snapshot, sk_progress* progress) {
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_follow: snapshot is null");
  return snapshot->live.follow(progress);
}

int sk_apply(sk_snapshot* snapshot, const char* const* paths, int32_t num_paths,
             sk_progress* progress) {
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_apply: snapshot is null");
  return snapshot->live.apply(paths, num_paths, progress);
}
