// One writer appends deltas and compacts the log, one thread follows it, and readers look keys up.
// Each row holds its key and the version that wrote it, and which keys a version writes or erases
// is a function of both; so a reader sees at once if a row is torn, or is not of the pinned
// version. Usage: live_stress FOLDER SECONDS [SEED [COPY]]. Used by test_live_stress.py and
// sanitize.sh.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "serving/format.h"
#include "serving/include/sparsekit_serving.h"

namespace {

using namespace sparsekit;
using namespace sparsekit::serving;

constexpr int64_t kKeys = 6000;
constexpr int64_t kKeysOfBase = 3000;
constexpr int kDim = 24;
constexpr int kReaders = 2;
constexpr uint64_t kLogId = 0x5EED;
constexpr int64_t kIndexSeed = 77;
constexpr uint64_t kCompactEvery = 64;

std::atomic<bool> stop{false};
uint64_t seed = 1;

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, sk_message());
  std::_Exit(1);
}

void check(int status, const char* what) {
  if (status != SK_OK) die(what);
}

uint64_t mix(uint64_t key, uint64_t version) {
  return hash_key(static_cast<int64_t>(hash_key(key * 2 + 1) + version * 3 + seed));
}

// Keys other than small numbers, negative ones among them.
int64_t key_of(int64_t i) {
  return static_cast<int64_t>(hash_key(i));
}

bool writes(int64_t i, uint64_t version) {
  return mix(i, version) % 16 == 0;
}

bool erases(int64_t i, uint64_t version) {
  return writes(i, version) && mix(i, version) / 16 % 4 == 0;
}

// Returns the version that wrote key i last, or -1 if it has no row in this version.
int64_t written_in(int64_t i, uint64_t version) {
  for (uint64_t v = version; v > 0; --v) {
    if (writes(i, v)) return erases(i, v) ? -1 : static_cast<int64_t>(v);
  }
  return i < kKeysOfBase ? 0 : -1;
}

void fill_row(int64_t i, uint64_t version, float* row) {
  row[0] = static_cast<float>(i);
  row[1] = static_cast<float>(version);
  for (int c = 2; c < kDim; ++c) row[c] = static_cast<float>(mix(i, version * kDim + c) >> 44);
}

void append(std::string* to, const void* bytes, size_t n) {
  to->append(static_cast<const char*>(bytes), n);
}

void write_file(const std::string& folder, const std::string& name, const std::string& bytes) {
  const std::string hidden = folder + "/." + name;
  std::FILE* file = std::fopen(hidden.c_str(), "wb");
  if (file == nullptr || std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() ||
      std::fclose(file) != 0 || std::rename(hidden.c_str(), (folder + "/" + name).c_str()) != 0) {
    die("cannot write a file");
  }
}

std::string base_name(uint64_t version) {
  char name[64];
  std::snprintf(name, sizeof name, "base-%020llu.sks", static_cast<unsigned long long>(version));
  return name;
}

std::string delta_name(uint64_t version, int rank) {
  char name[64];
  std::snprintf(name, sizeof name, "delta-%020llu-%05d-of-00002.skd",
                static_cast<unsigned long long>(version), rank);
  return name;
}

void write_base(const std::string& folder, uint64_t version) {
  std::vector<int64_t> keys;
  std::string rows;
  for (int64_t i = 0; i < kKeys; ++i) {
    const int64_t written = written_in(i, version);
    if (written < 0) continue;
    float row[kDim];
    fill_row(i, written, row);
    keys.push_back(key_of(i));
    append(&rows, row, sizeof row);
  }
  const auto n = static_cast<int64_t>(keys.size());
  std::vector<Bucket> buckets(sk_num_buckets(n));
  check(sk_build_index(keys.data(), n, kIndexSeed, buckets.data(),
                       static_cast<int64_t>(buckets.size())),
        "sk_build_index");
  const char name[] = "items";
  TableRecord record{};
  record.name_offset = kPage + sizeof record;
  record.name_bytes = 5;
  record.row_format = SK_FLOAT32;
  record.dim = kDim;
  record.row_bytes = kDim * 4;
  record.num_rows = n;
  record.num_buckets = buckets.size();
  record.index_seed = kIndexSeed;
  record.index_offset = 2 * kPage;
  const uint64_t index_bytes = buckets.size() * sizeof(Bucket);
  record.rows_offset = record.index_offset + (index_bytes + kPage - 1) / kPage * kPage;
  record.index_crc = sk_crc32(0, buckets.data(), index_bytes);
  record.rows_crc = sk_crc32(0, rows.data(), rows.size());
  record.miss = SK_MISS_ZEROS;
  std::string directory;
  append(&directory, &record, sizeof record);
  append(&directory, name, 5);
  SnapshotHeader header{};
  std::memcpy(header.magic, kSnapshotMagic, sizeof header.magic);
  header.format_version = kFormatVersion;
  header.num_tables = 1;
  header.file_bytes = record.rows_offset + rows.size();
  header.log_id = kLogId;
  header.version = version;
  header.dense_version = version * 10;
  header.directory_bytes = directory.size();
  header.directory_crc = sk_crc32(0, directory.data(), directory.size());
  header.crc = sk_crc32(0, &header, offsetof(SnapshotHeader, crc));
  std::string file;
  append(&file, &header, sizeof header);
  file += directory;
  file.resize(record.index_offset);
  append(&file, buckets.data(), index_bytes);
  file.resize(record.rows_offset);
  file += rows;
  write_file(folder, base_name(version), file);
}

void append_section(std::string* file, DeltaKind kind, const std::vector<int64_t>& keys,
                    const std::string& rows) {
  std::string data;
  append(&data, keys.data(), keys.size() * sizeof(int64_t));
  data += rows;
  data.resize((data.size() + 7) / 8 * 8);
  DeltaSection section{};
  section.kind = static_cast<uint32_t>(kind);
  section.row_format = SK_FLOAT32;
  section.row_bytes = kDim * 4;
  section.num_keys = keys.size();
  section.data_crc = sk_crc32(0, data.data(), data.size());
  section.header_crc = sk_crc32(0, &section, offsetof(DeltaSection, header_crc));
  append(file, &section, sizeof section);
  *file += data;
}

// Writes a part of a version: rank 0 has the even keys, rank 1 the odd ones.
void write_delta(const std::string& folder, uint64_t version, int rank) {
  std::vector<int64_t> written, erased;
  std::string rows;
  for (int64_t i = 0; i < kKeys; ++i) {
    if (!writes(i, version)) continue;
    if (i % 2 != rank) {
      // Some keys move from rank to rank: one erases them, and the other writes them.
      if (i % 3 == 0) erased.push_back(key_of(i));
      continue;
    }
    if (erases(i, version)) {
      erased.push_back(key_of(i));
      continue;
    }
    float row[kDim];
    fill_row(i, version, row);
    written.push_back(key_of(i));
    append(&rows, row, sizeof row);
  }
  std::string sections;
  append_section(&sections, DeltaKind::kTombstone, erased, "");
  append_section(&sections, DeltaKind::kUpsert, written, rows);
  DeltaHeader header{};
  std::memcpy(header.magic, kDeltaMagic, sizeof header.magic);
  header.format_version = kFormatVersion;
  header.num_sections = 2;
  header.file_bytes = sizeof header + sections.size();
  header.log_id = kLogId;
  header.version = version;
  header.dense_version = version * 10;
  header.rank = rank;
  header.num_ranks = 2;
  header.crc = sk_crc32(0, &header, offsetof(DeltaHeader, crc));
  std::string file;
  append(&file, &header, sizeof header);
  write_file(folder, delta_name(version, rank), file + sections);
}

void write_log(const std::string& folder, std::atomic<uint64_t>* last) {
  uint64_t base = 0;
  for (uint64_t version = 1; !stop; ++version) {
    write_delta(folder, version, version % 2);
    write_delta(folder, version, 1 - version % 2);
    *last = version;
    if (version % kCompactEvery != 0) continue;
    // A base that is a few versions behind, as one is that took a while to write.
    const uint64_t next = version - version / kCompactEvery % 3;
    write_base(folder, next);
    for (uint64_t v = base + 1; v <= next; ++v) {
      for (int rank = 0; rank < 2; ++rank) ::unlink((folder + "/" + delta_name(v, rank)).c_str());
    }
    ::unlink((folder + "/" + base_name(base)).c_str());
    base = next;
  }
}

void check_rows(const std::vector<int64_t>& which, uint64_t version, const std::vector<float>& out,
                const std::vector<uint8_t>& found) {
  for (size_t k = 0; k < which.size(); ++k) {
    const float* row = &out[k * kDim];
    const int64_t written = written_in(which[k], version);
    float expected[kDim] = {};
    if (written >= 0) fill_row(which[k], written, expected);
    if (found[k] != (written >= 0) || std::memcmp(row, expected, sizeof expected) != 0) {
      std::fprintf(stderr,
                   "key %lld in version %llu: found %d, a row of key %g, version %g; expected one "
                   "of version %lld\n",
                   static_cast<long long>(which[k]), static_cast<unsigned long long>(version),
                   found[k], static_cast<double>(row[0]), static_cast<double>(row[1]),
                   static_cast<long long>(written));
      std::_Exit(1);
    }
  }
}

void look_up(sk_snapshot* snapshot, const sk_pin& pin, const std::vector<int64_t>& which) {
  std::vector<int64_t> keys;
  for (const int64_t i : which) keys.push_back(key_of(i));
  std::vector<float> out(which.size() * kDim);
  std::vector<uint8_t> found(which.size());
  sk_feature feature{};
  feature.size = sizeof feature;
  feature.combiner = SK_NONE;
  feature.keys = keys.data();
  feature.num_keys = static_cast<int64_t>(keys.size());
  feature.out = out.data();
  feature.found = found.data();
  check(sk_lookup(snapshot, &pin, &feature, 1), "sk_lookup");
  check_rows(which, pin.version, out, found);
}

void read_rows(sk_snapshot* snapshot, int number, std::atomic<int64_t>* lookups) {
  std::mt19937_64 random(seed * 100 + number);
  uint64_t newest = 0;
  std::vector<int64_t> which(64);
  while (!stop) {
    sk_pin pin;
    check(sk_pin_newest(snapshot, &pin), "sk_pin_newest");
    if (pin.version < newest || pin.dense_version != pin.version * 10) die("versions went back");
    newest = pin.version;
    // A few pins last for several versions.
    const int times = random() % 200 == 0 ? 200 : 1;
    for (int i = 0; i < times; ++i) {
      for (int64_t& each : which) each = static_cast<int64_t>(random() % kKeys);
      look_up(snapshot, pin, which);
    }
    check(sk_unpin(snapshot, &pin), "sk_unpin");
    *lookups += times;
  }
}

uint64_t follow(sk_snapshot* snapshot, int64_t* busy) {
  sk_progress progress{};
  progress.size = sizeof progress;
  const int status = sk_follow(snapshot, &progress);
  if (status == SK_BUSY) {
    ++*busy;
  } else {
    check(status, "sk_follow");
  }
  return progress.version;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::string folder = argv[1];
  const double seconds = std::atof(argv[2]);
  if (argc > 3) seed = std::strtoull(argv[3], nullptr, 10);
  sk_open_options options{};
  options.size = sizeof options;
  options.verify = 1;
  options.copy = argc > 4;
  write_base(folder, 0);
  sk_snapshot* snapshot;
  check(sk_open(folder.c_str(), &options, &snapshot), "sk_open");

  std::atomic<uint64_t> last{0};
  std::atomic<int64_t> lookups{0};
  std::vector<std::thread> threads;
  threads.emplace_back(write_log, folder, &last);
  for (int r = 0; r < kReaders; ++r) threads.emplace_back(read_rows, snapshot, r, &lookups);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t busy = 0, calls = 0;
  while (std::chrono::steady_clock::now() < end) {
    follow(snapshot, &busy);
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();

  int64_t still_busy = 0;
  const uint64_t version = follow(snapshot, &still_busy);
  if (still_busy > 0 || version != last) die("the last version has not been taken over");
  std::vector<int64_t> all(kKeys);
  for (int64_t i = 0; i < kKeys; ++i) all[i] = i;
  sk_pin pin;
  check(sk_pin_newest(snapshot, &pin), "sk_pin_newest");
  look_up(snapshot, pin, all);
  if (sk_close(snapshot) != SK_BUSY) die("closed while a version is pinned");
  check(sk_unpin(snapshot, &pin), "sk_unpin");
  check(sk_close(snapshot), "sk_close");
  std::printf("%llu versions, %lld lookups, %lld calls of sk_follow, %lld of them busy\n",
              static_cast<unsigned long long>(version), static_cast<long long>(lookups.load()),
              static_cast<long long>(calls), static_cast<long long>(busy));
  return version > 0 && lookups > 0 ? 0 : 1;
}
