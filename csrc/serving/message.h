// Keeps each thread's last error message.
#pragma once

namespace sparsekit::serving {

// Formats, like printf, the message that sk_message() returns in this thread. Returns `status`.
[[gnu::format(printf, 2, 3)]] int fail(int status, const char* format, ...);

// Returns SK_IO_ERROR with the message "PATH: cannot WHAT: ERROR", where ERROR describes errno.
int fail_of_system(const char* path, const char* what);

}  // namespace sparsekit::serving
