// Layouts of snapshots and deltas in files; docs/serving_format.md explains them.
#pragma once

#include <cstdint>

#include "sparsekit/hash_table.h"

namespace sparsekit::serving {

constexpr int64_t kPage = 4096;
constexpr uint32_t kFormatVersion = 1;
constexpr char kSnapshotMagic[8] = {'\x89', 'S', 'K', 'S', '\r', '\n', '\x1a', '\n'};
constexpr char kDeltaMagic[8] = {'\x89', 'S', 'K', 'D', '\r', '\n', '\x1a', '\n'};
// Row numbers in buckets are int32.
constexpr int64_t kMostRows = INT32_MAX;
constexpr int64_t kMostDim = 1 << 20;
constexpr int64_t kMostTables = 1 << 16;
constexpr int64_t kMostNameBytes = 4096;

// First page of a snapshot. `crc` covers all bytes of the page that precede it.
struct SnapshotHeader {
  char magic[8];
  uint32_t format_version;
  uint32_t num_tables;
  uint64_t file_bytes;
  uint64_t log_id;
  uint64_t version;
  uint64_t dense_version;
  int64_t step;
  int64_t written_at;
  // The directory begins at kPage: the tables' records, then their names, then the note, a text
  // that says where the snapshot comes from.
  uint64_t directory_bytes;
  uint64_t note_offset;  // from the beginning of the file
  uint64_t note_bytes;
  uint8_t zeros[kPage - 8 - 8 - 9 * 8 - 8];
  uint32_t directory_crc;
  uint32_t crc;
};
static_assert(sizeof(SnapshotHeader) == kPage);

// A table in the directory. Its index and its rows begin at multiples of kPage.
struct TableRecord {
  uint64_t name_offset;  // from the beginning of the file
  uint32_t name_bytes;
  uint32_t row_format;
  uint32_t dim;
  uint32_t row_bytes;  // from one row to the next; rows are not aligned
  uint64_t num_rows;
  uint64_t num_buckets;  // at least 1
  int64_t index_seed;
  uint64_t index_offset;
  uint64_t rows_offset;
  uint32_t index_crc;
  uint32_t rows_crc;
  uint32_t miss;
  uint32_t distribution;  // of initial vectors, a Distribution
  uint64_t initial_seed;
  float a, b;              // parameters of the distribution
  uint64_t num_fallbacks;  // rows that unknown keys share
  uint32_t combiner;
  uint32_t has_padding_key;
  int64_t padding_key;
  uint8_t zeros[256 - 120];
};
static_assert(sizeof(TableRecord) == 256);

// The header of a delta. The sections follow without gaps. `crc` covers the header's bytes before
// that field.
struct DeltaHeader {
  char magic[8];
  uint32_t format_version;
  uint32_t num_sections;
  uint64_t file_bytes;
  uint64_t log_id;
  uint64_t version;  // its sequence number; it follows version - 1
  uint64_t dense_version;
  int64_t step;
  int64_t written_at;
  uint32_t rank;
  uint32_t num_ranks;
  uint8_t zeros[128 - 8 - 8 - 6 * 8 - 8 - 4];
  uint32_t crc;
};
static_assert(sizeof(DeltaHeader) == 128);

// A section consists of this header, int64 keys [num_keys], rows [num_keys, row_bytes] if they are
// upserts, and zeros up to a multiple of 8 bytes. All of a version's tombstones, from all ranks,
// are applied before any of its upserts.
enum class DeltaKind : uint32_t { kUpsert = 1, kTombstone = 2 };
struct DeltaSection {
  uint32_t table;  // place in the directory of the base
  uint32_t kind;
  uint32_t row_format;  // both as in the base
  uint32_t row_bytes;
  uint64_t num_keys;
  uint32_t data_crc;    // of the bytes from here to the next section
  uint32_t header_crc;  // of this header's bytes before it
};
static_assert(sizeof(DeltaSection) == 32);

}  // namespace sparsekit::serving
