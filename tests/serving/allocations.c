/* Counts the allocations of lookups: allocations SNAPSHOT prints their number. The snapshot has a
 * table of dim 16, of which every second key of -3000 to 2999 is unknown. */
#include <sparsekit_serving.h>
#include <stdio.h>
#include <stdlib.h>

void* __libc_malloc(size_t size);
void* __libc_calloc(size_t n, size_t size);
void* __libc_realloc(void* old, size_t size);
static volatile long count = 0;

void* malloc(size_t size) {
  ++count;
  return __libc_malloc(size);
}
void* calloc(size_t n, size_t size) {
  ++count;
  return __libc_calloc(n, size);
}
void* realloc(void* old, size_t size) {
  ++count;
  return __libc_realloc(old, size);
}

static int64_t keys[6000];
static float weights[6000], out[6000 * 16];
static uint8_t found[6000];

int main(int argc, char** argv) {
  sk_snapshot* snapshot;
  if (argc != 2 || sk_open(argv[1], NULL, &snapshot) != SK_OK) return puts(sk_message()), 1;
  const int64_t offsets[] = {0, 0, 1, 4, 1000, 1300, 1301, 6000};
  for (int i = 0; i < 6000; ++i) {
    keys[i] = i - 3000;
    weights[i] = (float)i;
  }
  const long opened = count;
  long before = 0;
  for (int round = 0; round < 2; ++round) {
    /* The first round lets the loader allocate what belongs to the thread. */
    before = count;
    for (int32_t combiner = SK_SUM; combiner <= SK_MAX; ++combiner) {
      sk_pin pin;
      sk_feature feature = {.size = sizeof feature,
                            .combiner = combiner,
                            .keys = keys,
                            .num_keys = 6000,
                            .offsets = offsets,
                            .num_bags = 7,
                            .out = out,
                            .found = found};
      if (combiner < SK_NONE) feature.weights = weights;
      if (sk_pin_newest(snapshot, &pin) != SK_OK ||
          sk_lookup(snapshot, &pin, &feature, 1) != SK_OK ||
          sk_lookup(snapshot, NULL, &feature, 1) != SK_OK || sk_unpin(snapshot, &pin) != SK_OK) {
        return puts(sk_message()), 1;
      }
    }
  }
  const long lookups = count - before;
  if (opened == 0) return puts("allocations are not counted"), 1;
  printf("%ld\n", lookups);
  return sk_close(snapshot);
}
