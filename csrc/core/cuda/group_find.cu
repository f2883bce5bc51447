// Finds and inserts the keys of all tables of a call in the same launches.
#include "sparsekit/group_find.h"

#include <algorithm>

#include "cuda/group_distinct.cuh"
#include "cuda/initial_row.cuh"

namespace sparsekit::cuda {
namespace {

// Returns the row of a key in this lane's table, or -1 if the key is absent. All lanes of the warp
// must call this function.
SPARSEKIT_DEVICE int32_t row_of_key(const DeviceGroup& group, int t, int64_t key, bool wanted) {
  const DeviceTable& table = group.tables[t];
  const bool hashed = table.buckets != nullptr;
  const int64_t seed = wanted && hashed ? *simt::global(table.hash_seed) : 0;
  const int32_t found = find_row(table.buckets, table.num_buckets, seed, key, wanted && hashed);
  if (!wanted || hashed) return found;
  return group.takes(t, key) ? static_cast<int32_t>(key / table.world_size) : -1;
}

SPARSEKIT_KERNEL group_find_kernel(DeviceGroup group, int32_t* rows, ErrorReport errors) {
  move_errors(errors);
  const int32_t entries = group.entries();
  // All lanes of a warp iterate together, since they communicate; `first` is the entry of lane 0.
  for (int64_t first = simt::global_thread() - simt::lane(); first < entries;
       first += simt::global_threads()) {
    const auto e = static_cast<int32_t>(first + simt::lane());
    const bool wanted = first + simt::lane() < entries;
    const int f = wanted ? group.feature_of(e) : 0;
    const int64_t key = wanted ? group.key(f, e) : 0;
    const int32_t row = row_of_key(group, group.features[f].table, key, wanted);
    if (wanted) rows[e] = row;
  }
}

// Numbers the keys: replaces inverse[e], which holds the slot of entry e's key, with the key's
// index in its table. The first entry of each key also looks up the key's row; if the key is
// missing, the row is -1 for now.
SPARSEKIT_KERNEL group_number_kernel(DeviceGroup group, FirstEntries firsts, Ranks missing,
                                     int32_t* inverse, int32_t* rows, int64_t* status) {
  const int32_t entries = group.entries();
  const int64_t tile = missing.totals.take_tile();
  uint32_t marks = 0;
#pragma unroll 1
  for (int i = 0; i < kMarkSteps; ++i) {
    const int64_t at = Ranks::entry(tile, i);
    const bool there = at < entries;
    const auto e = static_cast<int32_t>(at);
    const int f = there ? group.feature_of(e) : 0;
    const int t = group.features[f].table;
    const DeviceTable& table = group.tables[t];
    const int32_t begin = there ? group.first_entry(t) : 0;
    const int32_t first = there ? firsts.entry(inverse[e]) : -1;
    const int32_t number = there ? firsts.number(first, begin) : 0;
    const bool is_first = there && first == e;
    const int64_t key = is_first ? group.key(f, e) : 0;
    const int32_t row = row_of_key(group, t, key, is_first);
    if (there) inverse[e] = number;
    if (is_first) rows[begin + number] = row;
    const bool hashed = table.buckets != nullptr;
    if (is_first && hashed && row >= table.capacity)
      simt::store(&status[kStatusWords * t + 1], int64_t{-1});
    marks |= uint32_t{is_first && hashed && row < 0} << i;
  }
  missing.rank_tile(tile, marks);
}

// Decides whether the new keys fit, with one thread per table. This is decided before any key is
// inserted, so a refusal changes nothing.
SPARSEKIT_KERNEL group_admit_kernel(DeviceGroup group, Ranks first_seen, Ranks missing,
                                    int64_t* counts, int64_t* status, int64_t* refused,
                                    ErrorReport errors) {
  move_errors(errors);
  const int64_t t = simt::global_thread();
  if (t >= group.num_tables) return;
  const int32_t begin = group.first_entry(t), end = group.first_entry(t + 1);
  counts[t] = first_seen.rank(end) - first_seen.rank(begin);
  const DeviceTable& table = group.tables[t];
  if (table.buckets == nullptr) return;
  const int64_t absent = missing.rank(end) - missing.rank(begin);
  int64_t* size = simt::global(table.size);
  const int64_t before = *size, after = before + absent;
  const bool damaged = status[kStatusWords * t + 1] != 0 || before < 0 ||
                       before > table.num_buckets * kSlotsPerBucket;
  status[kStatusWords * t] = before;
  status[kStatusWords * t + 1] = damaged ? -1 : after > table.capacity ? absent : 0;
  if (status[kStatusWords * t + 1] == 0) {
    *size = after;
  } else if (refused != nullptr) {
    simt::atomic_min(refused, position_of_table(t, damaged ? 0 : absent));
  }
  status[kStatusWords * t + 2] = *size;
}

// Inserts the missing keys. Each warp handles one word of `missing`, with one bit for each of 32
// entries. Each lane with a set bit inserts the key of its entry; then all lanes together write the
// initial vectors of these keys.
template <class T>
SPARSEKIT_KERNEL __launch_bounds__(kGroupThreads)
    group_insert_kernel(DeviceGroup group, Ranks missing, const int32_t* inverse, int32_t* rows,
                        int64_t* status) {
  for (int64_t word = simt::global_thread() / simt::kWarp; word < missing.words;
       word += simt::global_threads() / simt::kWarp) {
    const uint32_t mask = missing.bits[word];
    if (mask == 0) continue;
    int t = 0;
    int32_t row = -1;
    int64_t key = 0;
    if (mask >> simt::lane() & 1) {
      const auto e = static_cast<int32_t>(word * simt::kWarp + simt::lane());
      const int f = group.feature_of(e);
      t = group.features[f].table;
      if (simt::load(&status[kStatusWords * t + 1]) == 0) {
        const DeviceTable& table = group.tables[t];
        const int32_t begin = group.first_entry(t);
        row =
            static_cast<int32_t>(status[kStatusWords * t]) + missing.rank(e) - missing.rank(begin);
        key = group.key(f, e);
        rows[begin + inverse[e]] = row;
        const int64_t seed = *simt::global(table.hash_seed);
        int64_t* damaged = &status[kStatusWords * t + 1];
        const bool inserted =
            insert_absent(table.buckets, table.num_buckets, seed, key, row, damaged) &&
            (table.larger == nullptr ||
             insert_absent(table.larger, table.num_larger, seed, key, row, damaged));
        if (!inserted) simt::store(damaged, int64_t{-1});
      }
    }
    for (uint32_t left = simt::warp_ballot(row >= 0); left != 0; left &= left - 1) {
      const int from = simt::lowest_bit(left);
      const DeviceTable& table = group.tables[simt::warp_shuffle(t, from)];
      const int64_t to = simt::warp_shuffle(row, from), of = simt::warp_shuffle(key, from);
      const Initializer initializer{static_cast<uint64_t>(*simt::global(table.seed)),
                                    table.distribution, table.a, table.b};
      T* weight = simt::global(static_cast<T*>(table.weight));
      const bool wide = draws_are_aligned(weight, table.dim, table.stride);
      T* at = weight + to * table.stride;
      for (int64_t column = simt::lane() * kDrawColumns; column < table.dim;
           column += simt::kWarp * kDrawColumns) {
        if (wide) {
          write_initial<T, kDrawWidth<T>>(at, table.dim, column, initializer, of);
        } else {
          write_initial<T, 1>(at, table.dim, column, initializer, of);
        }
      }
    }
  }
}

struct InsertWorkspace {
  FirstEntries firsts;
  Ranks missing;

  InsertWorkspace(Arena& arena, const GroupCall& call)
      : firsts(arena, call), missing(arena, call.entries, firsts.ranks.totals.after(1)) {}
};

}  // namespace

int64_t group_find_workspace_bytes(const GroupCall& call) {
  Arena arena;
  device_group(call, {}, arena);
  if (call.new_rows != nullptr) InsertWorkspace(arena, call);
  return arena.bytes();
}

void group_find(const GroupCall& call, const GroupBags& bags, int32_t* rows,
                const ErrorReport& errors, void* workspace, void* stream) {
  Arena arena(workspace);
  const DeviceGroup group = device_group(call, bags, arena);
  simt::launch("group_find: find", group_find_kernel,
               simt::strided_grid_for(call.entries, kGroupThreads), stream, group, rows, errors);
}

template <class T>
void group_find_or_insert(const GroupCall& call, const GroupBags& bags, int64_t seed, int32_t* rows,
                          int32_t* inverse, int64_t* counts, int64_t* status, int64_t* refused,
                          const ErrorReport& errors, void* workspace, void* stream) {
  if (call.num_tables == 0) return;
  Arena arena(workspace);
  const DeviceGroup group = device_group(call, bags, arena);
  const InsertWorkspace work(arena, call);
  // `inverse` holds slots until group_number_kernel replaces them with indices.
  find_first_entries(call, group, seed, work.firsts, inverse, status,
                     kStatusWords * call.num_tables, stream);
  simt::launch("group_find: number", group_number_kernel, work.missing.grid(), stream, group,
               work.firsts, work.missing, inverse, rows, status);
  simt::launch("group_find: admit", group_admit_kernel,
               simt::grid_for(std::max(call.num_tables, errors.count), kGroupThreads), stream,
               group, work.firsts.ranks, work.missing, counts, status, refused, errors);
  simt::launch("group_find: insert", group_insert_kernel<T>, grid_for_entries(call), stream, group,
               work.missing, inverse, rows, status);
}

SPARSEKIT_INSTANTIATE(group_find_or_insert)

}  // namespace sparsekit::cuda
