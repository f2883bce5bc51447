// Times lookups in native code, with no interpreter between them.
#include <chrono>

#include "serving/include/sparsekit_serving.h"
#include "serving/message.h"

extern "C" int sk_time_lookups(sk_snapshot* snapshot, const sk_feature* features,
                               int32_t num_features, int64_t num_calls, int64_t* nanoseconds) {
  using Clock = std::chrono::steady_clock;
  if (nanoseconds == nullptr && num_calls > 0) {
    return sparsekit::serving::fail(SK_BAD_ARGUMENT, "sk_time_lookups: nanoseconds is null");
  }
  for (int64_t i = 0; i < num_calls; ++i) {
    const Clock::time_point begin = Clock::now();
    const int status = sk_lookup(snapshot, nullptr, features + i * num_features, num_features);
    if (status != SK_OK) return status;
    const auto passed = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin);
    nanoseconds[i] = passed.count();
  }
  return SK_OK;
}
