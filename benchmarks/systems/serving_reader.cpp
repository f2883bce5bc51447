// Looks keys up while another thread follows a log, for serving_live.py.
// Usage: serving_reader FOLDER QUIET_SECONDS LIVE_SECONDS ROWS. Prints the line "pin NS"; the lines
// "warm", "quiet" and "live", each with the p50, p99 and p99.9 of lookup times in ns and the number
// of lookups; and for each version "seen DENSE_VERSION NS", the time since 1970 of the first lookup
// that saw it. The LIVE_SECONDS begin when a line arrives on stdin.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sparsekit_serving.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kBags = 26;
constexpr int kKeysInBag = 10;
constexpr int64_t kGolden = -7046029254386353131;

void check(int status) {
  if (status == SK_OK || status == SK_BUSY) return;
  std::fprintf(stderr, "%s\n", sk_message());
  std::exit(1);
}

int64_t since_1970() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
}

struct Reader {
  sk_snapshot* snapshot;
  int64_t rows;
  int dim;
  uint64_t state = 88172645463325252u;
  uint64_t dense_version = 0;
  std::vector<std::pair<uint64_t, int64_t>> seen;

  uint64_t random() {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }

  // Looks up keys for a while, and prints how long lookups take.
  void run(const char* name, double seconds) {
    std::vector<int64_t> keys(kBags * kKeysInBag), offsets(kBags + 1), times;
    std::vector<float> out(static_cast<size_t>(kBags) * dim);
    for (int b = 0; b <= kBags; ++b) offsets[b] = b * kKeysInBag;
    sk_feature feature{};
    feature.size = sizeof feature;
    feature.keys = keys.data();
    feature.num_keys = static_cast<int64_t>(keys.size());
    feature.offsets = offsets.data();
    feature.num_bags = kBags;
    feature.out = out.data();
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (Clock::now() < end) {
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % rows) * kGolden;
      const auto begin = Clock::now();
      sk_pin pin;
      check(sk_pin_newest(snapshot, &pin));
      check(sk_lookup(snapshot, &pin, &feature, 1));
      const uint64_t version = pin.dense_version;
      check(sk_unpin(snapshot, &pin));
      const auto time = Clock::now() - begin;
      times.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
      if (version != dense_version) seen.emplace_back(dense_version = version, since_1970());
      // Pause, like a server that is not saturated.
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    std::sort(times.begin(), times.end());
    const auto at = [&](double p) {
      return static_cast<long long>(times[static_cast<size_t>(p * (times.size() - 1))]);
    };
    std::printf("%s %lld %lld %lld %zu\n", name, at(0.5), at(0.99), at(0.999), times.size());
    std::fflush(stdout);
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  sk_snapshot* snapshot;
  check(sk_open(argv[1], nullptr, &snapshot));
  sk_table_info info{};
  info.size = sizeof info;
  check(sk_describe_table(snapshot, 0, &info));

  constexpr int kPins = 1000000;
  const auto begin = Clock::now();
  for (int i = 0; i < kPins; ++i) {
    sk_pin pin;
    sk_pin_newest(snapshot, &pin);
    sk_unpin(snapshot, &pin);
  }
  std::printf("pin %.1f\n",
              std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / kPins);

  Reader reader{snapshot, std::atoll(argv[4]), info.dim};
  reader.run("warm", 1);
  reader.run("quiet", std::atof(argv[2]));
  std::getchar();
  std::atomic<bool> stop{false};
  std::thread follower([&] {
    while (!stop) {
      check(sk_follow(snapshot, nullptr));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  reader.run("live", std::atof(argv[3]));
  stop = true;
  follower.join();
  for (const auto& [version, time] : reader.seen) {
    std::printf("seen %llu %lld\n", static_cast<unsigned long long>(version),
                static_cast<long long>(time));
  }
  check(sk_close(snapshot));
}
