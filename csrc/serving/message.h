// Keeps the message of the last error of each thread.
#pragma once

namespace sparsekit::serving {

// Sets the message that sk_message() returns in this thread, as printf does, and returns `status`.
[[gnu::format(printf, 2, 3)]] int fail(int status, const char* format, ...);

}  // namespace sparsekit::serving
