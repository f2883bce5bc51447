/* Lets one allocation fail after another while a version is taken over: short_memory BASE DELTA...
 * Whatever fails, the tables must then be those of a reader that never lacked memory. */
#include <inttypes.h>
#include <sparsekit_serving.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void* __libc_malloc(size_t size);
static volatile long left = -1; /* allocations before the one that fails; < 0: none does */

void* malloc(size_t size) {
  if (left >= 0 && left-- == 0) return NULL;
  return __libc_malloc(size);
}

enum { kKeys = 300, kTables = 2, kDim = 4, kMostVersions = 8 };
typedef struct {
  float out[kTables][kKeys * kDim];
  uint8_t found[kTables][kKeys];
} Tables;
static Tables expected[kMostVersions], now;

static void check(int status) {
  if (status == SK_OK) return;
  puts(sk_message());
  exit(1);
}

static void look_up(sk_snapshot* snapshot, Tables* to) {
  static int64_t keys[kKeys];
  memset(to, 0, sizeof *to);
  for (int i = 0; i < kKeys; ++i) keys[i] = i;
  for (int t = 0; t < kTables; ++t) {
    sk_feature feature = {.size = sizeof feature,
                          .table = t,
                          .combiner = SK_NONE,
                          .keys = keys,
                          .num_keys = kKeys,
                          .out = to->out[t],
                          .found = to->found[t]};
    check(sk_lookup(snapshot, NULL, &feature, 1));
  }
}

/* Takes over all deltas. Allocation number `failing` of the delta `short_of` fails. Returns whether
 * there was one. */
static int take_over(char** paths, int num_deltas, int short_of, long failing) {
  sk_snapshot* snapshot;
  int failed = 0;
  check(sk_open(paths[0], NULL, &snapshot));
  for (int d = 1; d <= num_deltas; ++d) {
    const char* path = paths[d];
    left = d == short_of ? failing : -1;
    int status = sk_apply(snapshot, &path, 1, NULL);
    failed |= d == short_of && left < 0;
    left = -1;
    if (d == short_of && status == SK_NO_MEMORY) {
      look_up(snapshot, &now);
      if (memcmp(&now, &expected[d - 1], sizeof now) != 0) {
        printf("allocation %ld of delta %d: it is seen although it failed\n", failing, d);
        exit(1);
      }
      status = sk_apply(snapshot, &path, 1, NULL);
    }
    check(status);
    if (short_of == 0) look_up(snapshot, &expected[d]);
    look_up(snapshot, &now);
    if (memcmp(&now, &expected[d], sizeof now) != 0) {
      printf("allocation %ld of delta %d: delta %d is not as it should be\n", failing, short_of, d);
      exit(1);
    }
  }
  check(sk_close(snapshot));
  return failed;
}

int main(int argc, char** argv) {
  const int num_deltas = argc - 2;
  if (num_deltas < 1 || num_deltas >= kMostVersions) return 2;
  sk_snapshot* snapshot;
  check(sk_open(argv[1], NULL, &snapshot));
  look_up(snapshot, &expected[0]);
  check(sk_close(snapshot));
  take_over(argv + 1, num_deltas, 0, -1);
  long failures = 0;
  for (int d = 1; d <= num_deltas; ++d) {
    for (long n = 0; take_over(argv + 1, num_deltas, d, n); ++n) ++failures;
  }
  printf("%s\n", failures > 10 ? "ok" : "too few allocations");
  return 0;
}
