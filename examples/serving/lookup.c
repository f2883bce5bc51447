/* Looks up and pools the 26 keys of a sample in a snapshot, as a server does for a request.
 *
 *     gcc -std=c99 lookup.c $(python -m sparsekit.serving --cflags --libs) -o lookup
 *     ./lookup model.sks TABLE [FIRST_KEY]
 *
 * model.sks may also be the folder of a delta log; lookups then read its newest version. */
#include <sparsekit_serving.h>
#include <stdio.h>
#include <stdlib.h>

#define KEYS 26
#define MOST_DIM 1024

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, sk_message());
  return 1;
}

static int look_up(sk_snapshot* snapshot, const char* name, int64_t first_key) {
  sk_table_info table = {.size = sizeof table};
  sk_feature feature = {.size = sizeof feature};
  int64_t keys[KEYS], offsets[2] = {0, KEYS};
  uint8_t found[KEYS];
  float out[MOST_DIM];
  int i, rows = 0, failure = 0;
  sk_pin pin;
  if (sk_find_table(snapshot, name, &feature.table)) return failed("sk_find_table");
  if (sk_describe_table(snapshot, feature.table, &table)) return failed("sk_describe_table");
  if (table.dim > MOST_DIM) return fprintf(stderr, "%s: dim is %d\n", name, table.dim), 1;
  for (i = 0; i < KEYS; ++i) keys[i] = first_key + i;
  feature.combiner = SK_SUM;
  feature.keys = keys;
  feature.num_keys = KEYS;
  feature.offsets = offsets; /* one bag with all keys */
  feature.num_bags = 1;
  feature.out = out;
  feature.found = found;
  /* With a pin, all lookups of a request read the same version. Its dense_version tells the server
   * which dense part of the model to use. */
  if (sk_pin_newest(snapshot, &pin)) return failed("sk_pin_newest");
  if (sk_lookup(snapshot, &pin, &feature, 1)) {
    failure = failed("sk_lookup");
  } else {
    for (i = 0; i < KEYS; ++i) rows += found[i];
    printf("version %llu: %d of %d keys have a row; the sum begins with %.6f\n",
           (unsigned long long)pin.version, rows, KEYS, out[0]);
  }
  sk_unpin(snapshot, &pin);
  return failure;
}

int main(int argc, char** argv) {
  sk_snapshot* snapshot;
  int failure;
  if (argc < 3) return fprintf(stderr, "usage: %s SNAPSHOT TABLE [FIRST_KEY]\n", argv[0]), 2;
  if (sk_abi_version() != SK_ABI_VERSION) return fputs("another version is loaded\n", stderr), 1;
  if (sk_open(argv[1], NULL, &snapshot)) return failed("sk_open");
  /* Takes over the deltas so far; a server calls this in a loop, in a thread of its own. It returns
   * SK_BAD_ARGUMENT if the snapshot is a single file, not a folder. */
  failure = sk_follow(snapshot, NULL);
  if (failure && failure != SK_BAD_ARGUMENT) failed("sk_follow");
  failure = look_up(snapshot, argv[2], argc > 3 ? strtoll(argv[3], NULL, 10) : 0);
  return sk_close(snapshot) || failure;
}
