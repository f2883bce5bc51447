// Groups the keys of all tables by owner and table, with a stable sort of the entries. The sorted
// order also gives the number and the position of the keys for each pair (owner, table).
#include "sparsekit/group_bucketize.h"

#include <algorithm>

#include "cuda/group_distinct.cuh"
#include "cuda/primitives.h"

namespace sparsekit::cuda {
namespace {

// A piece consists of the keys that one table sends to one rank. Pieces are numbered in sending
// order: by rank, then by table.
struct Pieces {
  int32_t world_size, num_tables;
  uint32_t* piece;  // [most] piece of each sorted entry; count() if the entry's key is not sent
  int32_t* entry;   // [most] entries, sorted by piece
  int32_t* begin;   // [count()] position of each piece's first key among all keys sent
  int32_t* before;  // [count() + 1] number of keys in the preceding pieces, ordered by table
  LookBack totals;  // totals of these numbers

  Pieces(Arena& arena, const GroupCall& call, int64_t ranks)
      : world_size(static_cast<int32_t>(ranks)),
        num_tables(static_cast<int32_t>(call.num_tables)),
        piece(arena.take<uint32_t>(call.entries)),
        entry(arena.take<int32_t>(call.entries)),
        begin(arena.take<int32_t>(count())),
        before(arena.take<int32_t>(count() + 1)),
        totals(arena, count() / kSumThreads + 1, 1) {}

  SPARSEKIT_HOST_DEVICE int64_t count() const { return int64_t{world_size} * num_tables; }
};

// Numbers the keys, and finds the piece for each key's first entry. If `distinct` is true,
// `inverse` initially holds the slots of the entries' keys. Also clears pieces.totals.
SPARSEKIT_KERNEL route_entries_kernel(DeviceGroup group, FirstEntries firsts, bool distinct,
                                      Pieces pieces, uint32_t* piece_of, int32_t* entries_of,
                                      int32_t* inverse, int64_t* bad_owners) {
  pieces.totals.clear();
  const int32_t entries = group.entries();
  for (int64_t i = simt::global_thread(); i < group.most; i += simt::global_threads()) {
    const auto e = static_cast<int32_t>(i);
    auto piece = static_cast<uint32_t>(pieces.count());
    if (e < entries) {
      const int f = group.feature_of(e), t = group.features[f].table;
      const int32_t begin = group.first_entry(t);
      const int32_t first = distinct ? firsts.entry(inverse[e]) : e;
      inverse[e] = distinct ? firsts.number(first, begin) : e - begin;
      if (first == e) {
        int64_t owner = owner_of(group.key(f, e), group.routes[t].owners);
        if (owner < 0 || owner >= pieces.world_size) {
          simt::atomic_min(bad_owners, int64_t{t});
          owner = 0;
        }
        piece = static_cast<uint32_t>(owner * pieces.num_tables + t);
      }
    }
    piece_of[e] = piece;
    entries_of[e] = e;
  }
}

// Returns the number of sorted entries in the pieces before `piece`.
SPARSEKIT_DEVICE int32_t entries_before(const Pieces& pieces, int32_t entries, int64_t piece) {
  int32_t begin = 0;
  for (int32_t count = entries; count > 0;) {
    const int32_t half = count / 2;
    if (pieces.piece[begin + half] < piece) {
      begin += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return begin;
}

// Counts the keys in each piece, with one thread per piece. Threads are numbered by table, then by
// rank.
SPARSEKIT_KERNEL count_pieces_kernel(Pieces pieces, int32_t entries, int64_t* counts) {
  const int64_t tile = pieces.totals.take_tile();
  const int64_t i = tile * kSumThreads + simt::thread();
  int32_t count = 0;
  if (i < pieces.count()) {
    const int64_t t = i / pieces.world_size, owner = i % pieces.world_size;
    const int64_t p = owner * pieces.num_tables + t;
    const int32_t begin = entries_before(pieces, entries, p);
    count = entries_before(pieces, entries, p + 1) - begin;
    pieces.begin[p] = begin;
    counts[p] = count;
  }
  const int32_t before = pieces.totals.sum_before_in_launch(tile, count);
  if (i <= pieces.count()) pieces.before[i] = before;
}

// Writes the keys to send, their positions, and the key counts, with one thread for each key and
// one for each table.
SPARSEKIT_KERNEL send_keys_kernel(DeviceGroup group, Pieces pieces, RoutedKeys to,
                                  int64_t* too_many_keys) {
  const int64_t i = simt::global_thread();
  const auto keys_before = [&](int64_t t) { return pieces.before[t * pieces.world_size]; };
  if (i < pieces.num_tables) to.numbers[i] = keys_before(i + 1) - keys_before(i);
  if (i >= group.most || pieces.piece[i] >= pieces.count()) return;
  const auto piece = static_cast<int32_t>(pieces.piece[i]);
  const int32_t owner = piece / pieces.num_tables, t = piece % pieces.num_tables;
  const int32_t e = pieces.entry[i];
  const int64_t key = group.key(group.feature_of(e), e);
  int32_t& place = to.places[group.first_entry(t) + to.inverse[e]];
  const int32_t number = static_cast<int32_t>(i) - pieces.begin[piece];
  if (to.rank_places == 0) {
    const int64_t own = int64_t{t} * pieces.world_size;
    to.keys[i] = key;
    place = pieces.before[own + owner] - pieces.before[own] + number;
    return;
  }
  const DeviceRoute& route = group.routes[t];
  if (number >= route.max_keys) {
    simt::atomic_min(too_many_keys, int64_t{t});
    place = owner * route.max_keys;
    return;
  }
  to.keys[owner * to.rank_places + route.first_place + number] = key;
  place = owner * route.max_keys + number;
}

struct RouteWorkspace {
  Pieces pieces;
  FirstEntries firsts;
  uint32_t* piece_of;  // [most] piece of each entry, before the sort
  int32_t* entries_of;
  char* sort;

  RouteWorkspace(Arena& arena, const GroupCall& call, int64_t world_size, bool distinct)
      : pieces(arena, call, world_size),
        firsts(arena, distinct ? call : GroupCall{}),
        piece_of(arena.take<uint32_t>(call.entries)),
        entries_of(arena.take<int32_t>(call.entries)),
        sort(arena.take<char>(sort_workspace_bytes(call.entries))) {}
};

// ---- rows of received vectors ----

struct ExchangeTable {
  int32_t first_bag;
  int32_t step;
};
struct ComeRows {
  int32_t begin, end;  // see ComeVectors
};

struct DeviceExchange {
  const ExchangeTable* tables;  // [num_tables + 1]
  const ComeRows* come;         // [num_tables, world_size]
  const int64_t* numbers;       // [num_tables] or null; see ExchangeCall
  int32_t num_tables, world_size, entries;
  const int32_t* bags;
  const int32_t* places;

  SPARSEKIT_DEVICE int32_t bound(int t) const { return bags[tables[t].first_bag]; }
  // Returns the table's first entry, clamped since bags may be bad.
  SPARSEKIT_DEVICE int32_t first_entry(int t) const {
    const int32_t at = bound(t);
    return at < 0 ? 0 : at > entries ? entries : at;
  }
  SPARSEKIT_DEVICE const ComeRows* of_table(int t) const { return come + int64_t{t} * world_size; }
  SPARSEKIT_DEVICE int32_t num_vectors(int t) const { return of_table(t)[world_size - 1].end; }
  SPARSEKIT_DEVICE int64_t num_keys(int t) const {
    return numbers == nullptr ? num_vectors(t) : numbers[t];
  }
};

// Checks tables and writes rows, with one thread per table and per entry.
SPARSEKIT_KERNEL exchange_rows_kernel(DeviceExchange call, int32_t* rows, ExchangeErrors errors) {
  const int64_t i = simt::global_thread();
  if (i < call.num_tables) {
    const auto t = static_cast<int>(i);
    const int32_t begin = call.bound(t), end = call.bound(t + 1);
    const bool rises = 0 <= begin && begin <= end && end <= call.entries;
    if (!rises || call.num_keys(t) > end - begin) simt::atomic_min(errors.bad_table, i);
  }
  if (i >= call.entries) return;
  const int t = last_up_to(i, call.num_tables, [&](int own) { return call.first_entry(own); });
  const int64_t number = i - call.first_entry(t);
  if (number < 0 || number >= call.num_keys(t) || i >= call.first_entry(t + 1)) return;
  const int32_t place = call.places[i];
  if (place < 0 || place >= call.num_vectors(t)) {
    simt::atomic_min(errors.bad_place, i);
    rows[i] = -1;
    return;
  }
  const ComeRows* ranks = call.of_table(t);
  const auto keys_before = [&](int rank) { return rank == 0 ? 0 : ranks[rank - 1].end; };
  const int rank = last_up_to(place, call.world_size, keys_before);
  rows[i] = ranks[rank].begin + (place - keys_before(rank)) * call.tables[t].step;
}

int64_t exchange_descriptor_bytes(const ExchangeCall& call) {
  return Descriptors::bytes<ExchangeTable>(call.num_tables + 1) +
         Descriptors::bytes<ComeRows>(call.num_tables * call.world_size);
}

}  // namespace

int64_t group_bucketize_workspace_bytes(const GroupCall& call, int64_t world_size, bool distinct) {
  Arena arena;
  device_group(call, {}, arena);
  RouteWorkspace(arena, call, world_size, distinct);
  return arena.bytes();
}

void group_bucketize(const GroupCall& call, const GroupBags& bags, int64_t world_size,
                     bool distinct, int64_t seed, const RoutedKeys& to,
                     const RouteErrorWords& errors, void* workspace, void* stream) {
  if (call.num_tables == 0) return;
  Arena arena(workspace);
  const DeviceGroup group = device_group(call, bags, arena);
  const RouteWorkspace work(arena, call, world_size, distinct);
  const Pieces& pieces = work.pieces;
  if (distinct) {
    find_first_entries(call, group, seed, work.firsts, to.inverse, nullptr, 0, stream);
  }
  simt::launch("group_bucketize: route", route_entries_kernel,
               simt::strided_grid_for(call.entries, kGroupThreads), stream, group, work.firsts,
               distinct, pieces, work.piece_of, work.entries_of, to.inverse, errors.bad_owners);
  sort_pairs(work.piece_of, pieces.piece, work.entries_of, pieces.entry, call.entries,
             bits_of(pieces.count()), work.sort, stream);
  simt::launch("group_bucketize: count", count_pieces_kernel, sum_grid(pieces.totals.tiles), stream,
               pieces, static_cast<int32_t>(call.entries), to.counts);
  simt::launch("group_bucketize: send", send_keys_kernel,
               simt::grid_for(std::max(call.entries, call.num_tables), kGroupThreads), stream,
               group, pieces, to, errors.too_many_keys);
}

int64_t exchange_rows_workspace_bytes(const ExchangeCall& call) {
  return exchange_descriptor_bytes(call);
}

void exchange_rows(const ExchangeCall& call, int32_t* rows, const ExchangeErrors& errors,
                   void* workspace, void* stream) {
  if (call.num_tables == 0) return;
  std::vector<ExchangeTable> tables;
  std::vector<ComeRows> come;
  tables.reserve(static_cast<size_t>(call.num_tables + 1));
  come.reserve(static_cast<size_t>(call.num_tables * call.world_size));
  for (int64_t t = 0; t <= call.num_tables; ++t) {
    const int64_t step = t < call.num_tables ? call.steps[t] : 0;
    tables.push_back({static_cast<int32_t>(call.first_bags[t]), static_cast<int32_t>(step)});
  }
  for (int64_t i = 0; i < call.num_tables * call.world_size; ++i) {
    const ComeVectors& part = call.come[i];
    come.push_back({static_cast<int32_t>(part.begin), static_cast<int32_t>(part.end)});
  }
  Descriptors descriptors(workspace);
  DeviceExchange exchange{};
  exchange.tables = descriptors.add(tables);
  exchange.come = descriptors.add(come);
  descriptors.send(stream);
  exchange.num_tables = static_cast<int32_t>(call.num_tables);
  exchange.world_size = static_cast<int32_t>(call.world_size);
  exchange.entries = static_cast<int32_t>(call.entries);
  exchange.numbers = call.numbers;
  exchange.bags = call.bags;
  exchange.places = call.places;
  simt::launch("group_exchange_rows", exchange_rows_kernel,
               simt::grid_for(std::max(call.entries, call.num_tables), kGroupThreads), stream,
               exchange, rows, errors);
}

}  // namespace sparsekit::cuda
