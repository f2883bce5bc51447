// All tables of a call in the same launches. Entries are numbered through, and those of a table lie
// side by side, so one scan of a bit for each entry ranks the first occurrences in all tables: the
// rank within a table is that among all entries, less that of the table's first entry.
#include "sparsekit/group_find.h"

#include <algorithm>

#include "cuda/group.cuh"
#include "cuda/hash_table.cuh"
#include "cuda/initial_row.cuh"
#include "cuda/primitives.h"

namespace sparsekit::cuda {
namespace {

// Numbers entries that have something in common, in their order: a bit for each, and how many there
// are before each word of bits.
struct Ranks {
  uint32_t* bits;   // [words]
  int32_t* before;  // [words + 1]
  void* scan;
  int64_t words;

  Ranks(Arena& arena, int64_t n)
      : bits(arena.take<uint32_t>((n + 31) / 32)),
        before(arena.take<int32_t>((n + 31) / 32 + 1)),
        scan(arena.take<char>(scan_workspace_bytes((n + 31) / 32 + 1))),
        words((n + 31) / 32) {}

  // By all lanes of the warp that has word `word`, each of which says whether its entry counts.
  SPARSEKIT_DEVICE void mark(int64_t word, bool counts) const {
    const uint32_t mask = simt::warp_ballot(counts);
    if (simt::lane() != 0) return;
    if (word < words) bits[word] = mask;
    before[word] = simt::count_bits(mask);
  }
  void scan_marks(void* stream) const { exclusive_scan(before, before, words + 1, scan, stream); }

  SPARSEKIT_DEVICE int32_t rank(int32_t e) const {
    const int in_word = e % 32;
    const int32_t whole = before[e / 32];
    return in_word == 0 ? whole
                        : whole + simt::count_bits(simt::lanes_before(bits[e / 32], in_word));
  }
};

// A scratch table with a part for each table of the call, 5 slots for 3 entries. A slot has the
// first entry, of those that have come so far, with some key; -1 while it is free.
SPARSEKIT_HOST_DEVICE inline int64_t slots_before(int64_t entries, int64_t table) {
  return entries + entries * 2 / 3 + table;
}

// slot_of[e] = slot of the key of entry e.
SPARSEKIT_KERNEL group_enter_kernel(DeviceGroup group, int64_t seed, int32_t* slots,
                                    uint32_t* slot_of) {
  const int32_t entries = group.entries();
  for (int64_t i = simt::global_thread(); i < entries; i += simt::global_threads()) {
    const auto e = static_cast<int32_t>(i);
    const int f = group.feature_of(e), t = group.features[f].table;
    const int64_t begin = slots_before(group.first_entry(t), t);
    const int64_t capacity = slots_before(group.first_entry(t + 1), t + 1) - begin;
    const int64_t key = group.key(f, e);
    const auto has_key = [&](int32_t other) {
      const bool same_feature = group.entry[f] <= other && other < group.entry[f + 1];
      return group.key(same_feature ? f : group.feature_of(other), other) == key;
    };
    int64_t s = home_bucket(key, seed, capacity);
    for (;;) {
      int32_t* slot = slots + begin + s;
      int32_t seen = simt::load(slot);
      if (seen < 0) seen = simt::atomic_cas(slot, int32_t{-1}, e);
      if (seen < 0) break;
      if (has_key(seen)) {
        if (seen > e) simt::atomic_min(slot, e);
        break;
      }
      s = s + 1 == capacity ? 0 : s + 1;
    }
    slot_of[e] = static_cast<uint32_t>(begin + s);
  }
}

// Which entries have a key that none before them has. Clears `status` besides.
SPARSEKIT_KERNEL group_mark_kernel(DeviceGroup group, const int32_t* slots, const uint32_t* slot_of,
                                   Ranks first_seen, int64_t* status) {
  for (int64_t i = simt::global_thread(); i < 2 * group.num_tables; i += simt::global_threads()) {
    status[i] = 0;
  }
  const int32_t entries = group.entries();
  for (int64_t word = simt::global_thread() / simt::kWarp; word <= first_seen.words;
       word += simt::global_threads() / simt::kWarp) {
    const int64_t e = word * simt::kWarp + simt::lane();
    first_seen.mark(word, e < entries && slots[slot_of[e]] == e);
  }
}

// Row of a key in this lane's table, -1 where it is absent. For a full warp.
SPARSEKIT_DEVICE int32_t row_of_key(const DeviceTable& table, int64_t key, bool wanted) {
  const bool hashed = table.buckets != nullptr;
  const int64_t seed = wanted && hashed ? *simt::global(table.hash_seed) : 0;
  const int32_t found = find_row(table.buckets, table.num_buckets, seed, key, wanted && hashed);
  if (!wanted || hashed) return found;
  const bool good = key >= 0 && key < table.end_key();
  return good ? static_cast<int32_t>(key / table.world_size) : -1;
}

SPARSEKIT_KERNEL group_find_kernel(DeviceGroup group, int32_t* rows) {
  const int32_t entries = group.entries();
  // Whole warps loop together: `first` is where the lanes of this one start.
  for (int64_t first = simt::global_thread() - simt::lane(); first < entries;
       first += simt::global_threads()) {
    const auto e = static_cast<int32_t>(first + simt::lane());
    const bool wanted = first + simt::lane() < entries;
    const int f = wanted ? group.feature_of(e) : 0;
    const int64_t key = wanted ? group.key(f, e) : 0;
    const int32_t row = row_of_key(group.tables[group.features[f].table], key, wanted);
    if (wanted) rows[e] = row;
  }
}

// inverse[e], so far the slot of entry e's key, becomes its number in the table. The first entry
// with a key finds its row; that of a missing one is -1 for now.
SPARSEKIT_KERNEL group_number_kernel(DeviceGroup group, const int32_t* slots, Ranks first_seen,
                                     Ranks missing, int32_t* inverse, int32_t* rows,
                                     int64_t* status) {
  const int32_t entries = group.entries();
  for (int64_t word = simt::global_thread() / simt::kWarp; word <= missing.words;
       word += simt::global_threads() / simt::kWarp) {
    const auto e = static_cast<int32_t>(word * simt::kWarp + simt::lane());
    const bool there = word * simt::kWarp + simt::lane() < entries;
    const int f = there ? group.feature_of(e) : 0;
    const int t = group.features[f].table;
    const DeviceTable& table = group.tables[t];
    const int32_t begin = there ? group.first_entry(t) : 0;
    const int32_t first = there ? slots[static_cast<uint32_t>(inverse[e])] : -1;
    const int32_t number = there ? first_seen.rank(first) - first_seen.rank(begin) : 0;
    const bool is_first = there && first == e;
    const int64_t key = is_first ? group.key(f, e) : 0;
    const int32_t row = row_of_key(table, key, is_first);
    if (there) inverse[e] = number;
    if (is_first) rows[begin + number] = row;
    const bool hashed = table.buckets != nullptr;
    if (is_first && hashed && row >= table.capacity) simt::store(&status[2 * t + 1], int64_t{-1});
    missing.mark(word, is_first && hashed && row < 0);
  }
}

// A thread decides for a table, so that a refusal changes nothing.
SPARSEKIT_KERNEL group_admit_kernel(DeviceGroup group, Ranks first_seen, Ranks missing,
                                    int64_t* counts, int64_t* status) {
  const int64_t t = simt::global_thread();
  if (t >= group.num_tables) return;
  const int32_t begin = group.first_entry(t), end = group.first_entry(t + 1);
  counts[t] = first_seen.rank(end) - first_seen.rank(begin);
  const DeviceTable& table = group.tables[t];
  if (table.buckets == nullptr) return;
  const int64_t absent = missing.rank(end) - missing.rank(begin);
  int64_t* size = simt::global(table.size);
  const int64_t before = *size, after = before + absent;
  const bool damaged =
      status[2 * t + 1] != 0 || before < 0 || before > table.num_buckets * kSlotsPerBucket;
  status[2 * t] = before;
  status[2 * t + 1] = damaged ? -1 : after > table.capacity ? absent : 0;
  if (status[2 * t + 1] == 0) *size = after;
}

// A warp looks at a word of missing keys: each lane stores one, then all write its row.
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
      if (simt::load(&status[2 * t + 1]) == 0) {
        const DeviceTable& table = group.tables[t];
        const int32_t begin = group.first_entry(t);
        row = static_cast<int32_t>(status[2 * t]) + missing.rank(e) - missing.rank(begin);
        key = group.key(f, e);
        rows[begin + inverse[e]] = row;
        if (!insert_absent(table.buckets, table.num_buckets, *simt::global(table.hash_seed), key,
                           row, &status[2 * t + 1])) {
          simt::store(&status[2 * t + 1], int64_t{-1});
        }
      }
    }
    for (uint32_t left = simt::warp_ballot(row >= 0); left != 0; left &= left - 1) {
      const int from = simt::lowest_bit(left);
      const DeviceTable& table = group.tables[simt::warp_shuffle(t, from)];
      const int64_t to = simt::warp_shuffle(row, from), of = simt::warp_shuffle(key, from);
      const Initializer initializer{static_cast<uint64_t>(*simt::global(table.seed)),
                                    table.distribution, table.a, table.b};
      T* weight = simt::global(static_cast<T*>(table.weight));
      const bool wide = draws_are_aligned(weight, table.dim);
      T* at = weight + to * table.dim;
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
  int32_t* slots;
  Ranks first_seen, missing;

  InsertWorkspace(Arena& arena, const GroupCall& call)
      : slots(arena.take<int32_t>(num_slots(call))),
        first_seen(arena, call.entries),
        missing(arena, call.entries) {}

  static int64_t num_slots(const GroupCall& call) {
    return slots_before(call.entries, call.num_tables);
  }
};

}  // namespace

int64_t group_find_workspace_bytes(const GroupCall& call) {
  Arena arena;
  device_group(call, {}, arena);
  if (call.new_rows != nullptr) InsertWorkspace(arena, call);
  return arena.bytes();
}

void group_find(const GroupCall& call, const GroupBags& bags, int32_t* rows, void* workspace,
                void* stream) {
  Arena arena(workspace);
  const DeviceGroup group = device_group(call, bags, arena);
  simt::launch("group_find: find", group_find_kernel,
               simt::strided_grid_for(call.entries, kGroupThreads), stream, group, rows);
}

template <class T>
void group_find_or_insert(const GroupCall& call, const GroupBags& bags, int64_t seed, int32_t* rows,
                          int32_t* inverse, int64_t* counts, int64_t* status, void* workspace,
                          void* stream) {
  if (call.num_tables == 0) return;
  Arena arena(workspace);
  const DeviceGroup group = device_group(call, bags, arena);
  const InsertWorkspace work(arena, call);
  // As many threads as entries, and as words of bits have lanes.
  const simt::Grid grid = simt::strided_grid_for(call.entries + simt::kWarp, kGroupThreads);
  simt::fill_bytes(work.slots, 0xFF,
                   InsertWorkspace::num_slots(call) * static_cast<int64_t>(sizeof *work.slots),
                   stream);
  // Until there are numbers, `inverse` holds slots.
  auto* slot_of = reinterpret_cast<uint32_t*>(inverse);
  simt::launch("group_find: enter", group_enter_kernel, grid, stream, group, seed, work.slots,
               slot_of);
  simt::launch("group_find: mark", group_mark_kernel, grid, stream, group, work.slots, slot_of,
               work.first_seen, status);
  work.first_seen.scan_marks(stream);
  simt::launch("group_find: number", group_number_kernel, grid, stream, group, work.slots,
               work.first_seen, work.missing, inverse, rows, status);
  work.missing.scan_marks(stream);
  simt::launch("group_find: admit", group_admit_kernel,
               simt::grid_for(call.num_tables, kGroupThreads), stream, group, work.first_seen,
               work.missing, counts, status);
  simt::launch("group_find: insert", group_insert_kernel<T>, grid, stream, group, work.missing,
               inverse, rows, status);
}

#define SPARSEKIT_INSTANTIATE(T)                                                               \
  template void group_find_or_insert<T>(const GroupCall&, const GroupBags&, int64_t, int32_t*, \
                                        int32_t*, int64_t*, int64_t*, void*, void*);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cuda
