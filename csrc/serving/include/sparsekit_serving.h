/* Looks up embedding vectors for raw 64-bit keys in a snapshot of trained tables, from any language
 * that can call C. The library needs neither Python nor torch.
 *
 *     sk_snapshot* snapshot;
 *     if (sk_open("model.sks", NULL, &snapshot)) puts(sk_message());
 *
 * Every function that can fail returns an sk_status; SK_OK is 0. sk_message() then describes the
 * error. Output arguments are written only on success, unless stated otherwise.
 *
 * Threads. Any number of threads may use one snapshot at the same time. Lookups take no lock and
 * allocate no memory. Only sk_close() must not run at the same time as other calls on the same
 * snapshot; calls of sk_follow() and sk_apply() wait for each other.
 *
 * Structs that are passed in begin with their size, which callers set to sizeof(the struct). From
 * it, a newer library knows which fields an older caller has, and takes the others as 0.
 * docs/serving_format.md describes the files. */
#ifndef SPARSEKIT_SERVING_H
#define SPARSEKIT_SERVING_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define SK_API
#else
#define SK_API __attribute__((visibility("default")))
#endif

#define SK_ABI_VERSION 1

/* Returns SK_ABI_VERSION of the loaded library, which must equal that of this header. */
SK_API int sk_abi_version(void);

typedef enum sk_status {
  SK_OK = 0,
  SK_BAD_ARGUMENT = 1, /* the caller's mistake, such as a table that does not exist */
  SK_IO_ERROR = 2,     /* the operating system could not read, map or lock a file */
  SK_DAMAGED = 3,      /* a file is not what it claims to be: checksum, size, sequence */
  SK_NEWER_FORMAT = 4, /* the file's format is newer than this library */
  SK_UNKNOWN_KEY = 5,  /* the table lacks the key, and refuses unknown ones (SK_MISS_ERROR) */
  SK_NO_MEMORY = 6,    /* no memory, or no room left for rows that deltas bring */
  SK_GAP = 7,          /* a delta is missing, but later ones are there */
  SK_BUSY = 8          /* versions are pinned; try again later */
} sk_status;

/* Returns the message of the last call that failed in this thread; "" if none has. It is valid
 * until the next failure in this thread, and names the file, the table and the wrong value, where
 * there are any. */
SK_API const char* sk_message(void);

/* ---- opening ---- */

typedef struct sk_snapshot sk_snapshot;

typedef struct sk_open_options {
  size_t size;
  int verify;   /* 1: read the whole file, and compare all checksums. 0: only those of the header,
                   so that the time to open does not depend on the file's size. A lookup in a file
                   whose data are damaged returns wrong numbers, but touches no other memory. */
  int prefault; /* 1: read all pages into memory now, so that the first lookups are fast, too */
  int lock;     /* 1: keep all pages of the file in memory (mlock). An index that deltas have
                   enlarged is not locked. */
  int copy;     /* 1: copy the file into this process's own memory, in huge pages where the system
                   has them. Faster for random keys, but processes do not share it. */
} sk_open_options;

/* Opens a snapshot: a file, or the newest base in the folder of a delta log; call sk_follow() to
 * bring that up to date. options may be NULL. While it is open, the file may be removed, or
 * replaced by renaming another file, but not written to or truncated: it is mapped. */
SK_API int sk_open(const char* path, const sk_open_options* options, sk_snapshot** snapshot);

/* Closes a snapshot; NULL is allowed. SK_BUSY if a version is pinned; nothing is closed then. */
SK_API int sk_close(sk_snapshot* snapshot);

/* ---- what is in it ---- */

typedef struct sk_info {
  size_t size;
  uint64_t log_id;        /* ID of the delta log that the snapshot belongs to; 0 if none */
  uint64_t version;       /* sequence number of the last delta that it includes; 0 if none */
  uint64_t dense_version; /* the trainer's number for the dense part of this version */
  int64_t step;           /* of training; -1 if unknown */
  int64_t written_at;     /* when the version was written, in nanoseconds since 1970 UTC */
  int32_t tables;
} sk_info;

typedef enum sk_row_format {
  SK_FLOAT32 = 0,
  SK_FLOAT16 = 1,
  SK_BFLOAT16 = 2,
  SK_INT8 = 3, /* dim unsigned bytes, then scale and bias as float16 */
  SK_INT4 = 4  /* two columns in a byte, the first in the low half, then scale and bias */
} sk_row_format;

typedef enum sk_miss {
  SK_MISS_INITIAL = 0,  /* a key without a row has the initial vector of training */
  SK_MISS_ZEROS = 1,    /* a row of zeros */
  SK_MISS_FALLBACK = 2, /* one of the rows that unknown keys share */
  SK_MISS_ERROR = 3     /* SK_UNKNOWN_KEY */
} sk_miss;

typedef enum sk_combiner {
  SK_SUM = 0,
  SK_MEAN = 1,
  SK_SQRTN = 2,
  SK_NONE = 3, /* no pooling: a vector for each key */
  SK_MAX = 4   /* largest of each column; takes no weights */
} sk_combiner;

typedef struct sk_table_info {
  size_t size;
  const char* name; /* valid until the snapshot is closed */
  int64_t rows;     /* in use */
  int32_t dim;
  int32_t row_bytes;
  int32_t row_format; /* sk_row_format */
  int32_t miss;       /* sk_miss */
  int32_t combiner;   /* of the layer, an sk_combiner; a hint; lookups specify their own */
  int32_t has_padding_key;
  int64_t padding_key;
} sk_table_info;

/* Fill in a struct whose `size` the caller has set, with the values of the newest version. */
SK_API int sk_describe(sk_snapshot* snapshot, sk_info* info);
SK_API int sk_describe_table(sk_snapshot* snapshot, int32_t table, sk_table_info* info);

/* Finds the number of the table with this name. */
SK_API int sk_find_table(sk_snapshot* snapshot, const char* name, int32_t* table);

/* ---- versions ---- */

/* A version that stays unchanged while it is pinned, whatever sk_follow() brings. */
typedef struct sk_pin {
  uint64_t version;
  uint64_t dense_version;
  uint64_t internal[2];
} sk_pin;

/* Pins the newest version. Takes tens of nanoseconds, and no lock. Unpin soon: while an older
 * version is pinned, sk_follow() can take over only one newer version. Any thread may use or end a
 * pin. */
SK_API int sk_pin_newest(sk_snapshot* snapshot, sk_pin* pin);
SK_API int sk_unpin(sk_snapshot* snapshot, sk_pin* pin);

/* ---- lookups ---- */

/* Bags of keys for one table. Bag b has keys[offsets[b]] to keys[offsets[b + 1] - 1]. */
typedef struct sk_feature {
  size_t size;
  int32_t table;
  int32_t combiner;    /* sk_combiner */
  const int64_t* keys; /* [num_keys] */
  int64_t num_keys;
  const int64_t* offsets; /* [num_bags + 1], from 0 to num_keys. NULL: each key is a bag */
  int64_t num_bags;       /* not read if offsets is NULL */
  const float* weights;   /* [num_keys], or NULL for weights of 1 */
  float* out;             /* [num_bags, dim]; with SK_NONE [num_keys, dim] */
  int64_t out_stride;     /* floats from one vector to the next, at least dim; 0 means dim */
  uint8_t* found;         /* [num_keys], or NULL: set to 1 where a key has a row, else 0 */
} sk_feature;

/* Looks up the bags of all features, which may have different tables, in one version: the pinned
 * one, or the newest if pin is NULL. On an error, `out` and `found` are undefined. Keys equal to
 * the table's padding key are left out; the vector of a bag without keys is zeros. */
SK_API int sk_lookup(sk_snapshot* snapshot, const sk_pin* pin, const sk_feature* features,
                     int32_t num_features);

/* Calls sk_lookup() num_calls times in this thread, each time with the next num_features of
 * features [num_calls * num_features], and writes each call's duration to `nanoseconds`
 * [num_calls]. Stops at the first lookup that fails. */
SK_API int sk_time_lookups(sk_snapshot* snapshot, const sk_feature* features, int32_t num_features,
                           int64_t num_calls, int64_t* nanoseconds);

/* Finds the k rows of a table whose vectors have the largest dot products with `query` [dim]:
 * keys [k] and scores [k], best first, ties by the smaller key. *found becomes the number of rows
 * found, which is below k if the table has fewer rows. The result is exact, and the same on every
 * machine, since scores are sums in float in a fixed order. The padding key, and rows that unknown
 * keys share, are left out. Takes time in proportion to the table's rows, and allocates memory. */
SK_API int sk_top_k(sk_snapshot* snapshot, const sk_pin* pin, int32_t table, const float* query,
                    int32_t k, int64_t* keys, float* scores, int32_t* found);

/* ---- new versions ---- */

typedef struct sk_progress {
  size_t size;
  uint64_t version;     /* the newest version that lookups now see */
  int64_t deltas;       /* that this call has taken over */
  int64_t rows_written; /* by them */
  int64_t rows_erased;
} sk_progress;

/* Takes over what is new in the delta log since the last call. Only for snapshots opened from a
 * folder. Never waits for new files; call it in a loop, from a thread of your own. All complete
 * versions are taken over together. On an error the last good version stays, and the next call
 * tries again. progress may be NULL; it is filled in on errors, too. */
SK_API int sk_follow(sk_snapshot* snapshot, sk_progress* progress);

/* Takes over one version, given the delta files of all ranks. */
SK_API int sk_apply(sk_snapshot* snapshot, const char* const* paths, int32_t num_paths,
                    sk_progress* progress);

/* ---- writing: what writers of snapshots and deltas need ---- */

/* Returns the bytes of a row, or 0 for an unknown format or a dim that is not positive. */
SK_API int64_t sk_row_bytes(int32_t row_format, int64_t dim);

/* Encodes rows [n, dim] as row_format into `out` [n, sk_row_bytes]. Refuses rows that the format
 * cannot hold: rows with NaN; with infinities, except in SK_FLOAT32 and SK_BFLOAT16; with finite
 * values that would become infinite; and, in SK_INT8 and SK_INT4, rows whose scale or bias is
 * beyond float16's range. *bad becomes the first such row, or -1 if there is none. */
SK_API int sk_encode_rows(int32_t row_format, const float* rows, int64_t n, int64_t dim, void* out,
                          int64_t* bad);

/* Decodes rows into `out` [n, dim]. */
SK_API int sk_decode_rows(int32_t row_format, const void* rows, int64_t n, int64_t dim, float* out);

/* Returns the number of buckets (64 bytes each) in an index for n keys. */
SK_API int64_t sk_num_buckets(int64_t n);

/* Fills buckets [num_buckets] with an index that maps keys[i] to row i. If a key occurs twice,
 * returns SK_BAD_ARGUMENT with a message that names it. */
SK_API int sk_build_index(const int64_t* keys, int64_t n, int64_t seed, void* buckets,
                          int64_t num_buckets);

/* Returns the CRC-32, as zlib defines it, continued from `crc` (0 at first). */
SK_API uint32_t sk_crc32(uint32_t crc, const void* bytes, size_t n);

#ifdef __cplusplus
}
#endif
#endif
