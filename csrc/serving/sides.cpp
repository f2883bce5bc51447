#include "serving/sides.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "serving/include/sparsekit_serving.h"
#include "serving/message.h"

namespace sparsekit::serving {
namespace {

// Prefetch distance for buckets, in keys.
constexpr int64_t kAhead = 16;

// Calls use(key, i) for each key; stops and returns false if a call returns false.
template <class Use>
bool for_keys(const LiveIndex& index, const int64_t* keys, int64_t n, Use&& use) {
  for (int64_t i = 0; i < std::min(n, kAhead); ++i) index.prefetch(keys[i]);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) index.prefetch(keys[i + kAhead]);
    if (!use(keys[i], i)) return false;
  }
  return true;
}

int damaged_index(const Side& side, size_t table) {
  return fail(SK_DAMAGED, "table %s: its index is damaged; open the snapshot with verify=1",
              side.version.tables[table].name);
}

int no_room_in_index(const Side& side, size_t table, int64_t more) {
  return fail(SK_NO_MEMORY,
              "table %s: no memory for an index with %" PRId64
              " keys more, or its "
              "index is damaged",
              side.version.tables[table].name, more);
}

// After a table's index has changed, updates the table in the version that lookups read.
void show_table(Side* side, size_t table) {
  TableView& view = side->version.tables[table];
  const LiveIndex& index = side->indexes[table];
  view.buckets = index.buckets();
  view.num_buckets = index.num_buckets();
  view.num_keys = index.num_keys();
  view.row_limit = std::max(view.row_limit, side->base->spare[table].limit());
}

void show_tables(Side* side) {
  for (size_t t = 0; t < side->indexes.size(); ++t) show_table(side, t);
}

template <class T>
void make_room(std::vector<T>* vector, size_t more) {
  const size_t needed = vector->size() + more;
  if (needed > vector->capacity()) vector->reserve(std::max(needed, 2 * vector->capacity()));
}

// Makes all allocations before anything is changed, since any of them may fail.
int prepare(const std::vector<DeltaFile>& parts, Side* side, Batch* batch) {
  const size_t num_tables = side->indexes.size();
  std::vector<int64_t> upserts(num_tables), keys(num_tables);
  for (const DeltaFile& part : parts) {
    for (const Section& section : part.sections) {
      keys[section.table] += section.num_keys;
      if (!section.tombstones) upserts[section.table] += section.num_keys;
    }
  }
  batch->tables.resize(num_tables);
  for (size_t t = 0; t < num_tables; ++t) {
    if (keys[t] == 0) continue;
    Batch::OfTable& of_table = batch->tables[t];
    make_room(&of_table.edits, keys[t]);
    make_room(&of_table.left, keys[t]);
    make_room(&of_table.taken, upserts[t]);
    const TableView& view = side->version.tables[t];
    switch (side->base->spare[t].reserve(upserts[t])) {
      case SpareRows::Room::kYes:
        break;
      case SpareRows::Room::kFull:
        return fail(SK_NO_MEMORY,
                    "table %s: no room for %" PRId64 " rows beside %" PRId64
                    " that deltas have "
                    "brought; a newer base makes room: compact the log",
                    view.name, upserts[t], side->base->spare[t].in_use());
      case SpareRows::Room::kNoMemory:
        return fail(SK_NO_MEMORY, "table %s: no memory for %" PRId64 " rows of %" PRId64 " bytes",
                    view.name, upserts[t], view.row_bytes);
    }
    if (!side->indexes[t].reserve(upserts[t])) return no_room_in_index(*side, t, upserts[t]);
    // reserve() may have replaced the index. Show the new one now: even if the next table has no
    // room, lookups will read this side, with the batch's earlier versions applied.
    show_table(side, t);
  }
  return SK_OK;
}

bool erase(const Section& section, LiveIndex* index, Batch* batch) {
  Batch::OfTable& of_table = batch->tables[section.table];
  return for_keys(*index, section.keys, section.num_keys, [&](int64_t key, int64_t) {
    const int64_t before = index->remove(key);
    if (before < 0) return before != LiveIndex::kDamaged;
    of_table.edits.push_back({key, -1});
    of_table.left.push_back(static_cast<int32_t>(before));
    ++batch->rows_erased;
    return true;
  });
}

bool write(const Section& section, int64_t row_bytes, LiveIndex* index, SpareRows* spare,
           Batch* batch) {
  Batch::OfTable& of_table = batch->tables[section.table];
  return for_keys(*index, section.keys, section.num_keys, [&](int64_t key, int64_t i) {
    const uint8_t* bytes = section.rows + i * row_bytes;
    const int64_t now = index->find(key);
    ++batch->rows_written;
    if (spare->is_of(batch->number, now)) {  // an earlier version of this batch wrote it
      std::memcpy(spare->at(static_cast<int32_t>(now)), bytes, row_bytes);
      return true;
    }
    const int32_t row = spare->take(batch->number);
    std::memcpy(spare->at(row), bytes, row_bytes);
    of_table.taken.push_back(row);
    const int64_t before = index->put(key, row);
    if (before == LiveIndex::kDamaged) return false;
    of_table.edits.push_back({key, row});
    if (before >= 0) of_table.left.push_back(static_cast<int32_t>(before));
    return true;
  });
}

}  // namespace

int begin_side(std::shared_ptr<Base> base, Side* side) {
  Side fresh;
  fresh.version = base->version;
  fresh.base = std::move(base);
  for (size_t t = 0; t < fresh.version.tables.size(); ++t) {
    const TableView& view = fresh.version.tables[t];
    Memory memory;
    if (const int status = private_index(*fresh.base->file, t, &memory)) return status;
    fresh.indexes.emplace_back(std::move(memory), view.num_buckets, view.index_seed, view.num_keys);
  }
  show_tables(&fresh);
  *side = std::move(fresh);
  return SK_OK;
}

int copy_side(const Side& from, Side* side) {
  Side copy;
  copy.base = from.base;
  copy.version = from.version;
  for (const TableView& view : from.version.tables) {
    copy.indexes.emplace_back();
    if (!copy.indexes.back().copy(view.buckets, view.num_buckets, view.index_seed, view.num_keys)) {
      return fail(SK_NO_MEMORY, "table %s: no memory for its index", view.name);
    }
  }
  show_tables(&copy);
  *side = std::move(copy);
  return SK_OK;
}

int apply_version(const std::vector<DeltaFile>& parts, Side* side, Batch* batch) {
  if (const int status = prepare(parts, side, batch)) return status;
  // Apply tombstones first: a key that moves between ranks is erased by one part and written by
  // another.
  for (const bool tombstones : {true, false}) {
    for (const DeltaFile& part : parts) {
      for (const Section& section : part.sections) {
        if (section.tombstones != tombstones) continue;
        LiveIndex& index = side->indexes[section.table];
        const int64_t row_bytes = side->version.tables[section.table].row_bytes;
        const bool sound = tombstones ? erase(section, &index, batch)
                                      : write(section, row_bytes, &index,
                                              &side->base->spare[section.table], batch);
        if (!sound) return damaged_index(*side, section.table);
      }
    }
  }
  ++batch->versions;
  Version& version = side->version;
  const DeltaHeader& first = parts.front().header;
  version.version = first.version;
  version.dense_version = first.dense_version;
  version.step = first.step;
  version.written_at = first.written_at;
  for (const DeltaFile& part : parts) {
    version.written_at = std::max(version.written_at, part.header.written_at);
  }
  show_tables(side);
  return SK_OK;
}

int replay(const Batch& batch, const Version& to, Side* side) {
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    const auto more = static_cast<int64_t>(batch.tables[t].taken.size());
    if (!side->indexes[t].reserve(more)) return no_room_in_index(*side, t, more);
  }
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    LiveIndex& index = side->indexes[t];
    const std::vector<Batch::Edit>& edits = batch.tables[t].edits;
    const auto n = static_cast<int64_t>(edits.size());
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) index.prefetch(edits[i + kAhead].key);
      const auto [key, row] = edits[i];
      const int64_t before = row < 0 ? index.remove(key) : index.put(key, row);
      if (before == LiveIndex::kDamaged) return damaged_index(*side, t);
    }
  }
  side->version.version = to.version;
  side->version.dense_version = to.dense_version;
  side->version.step = to.step;
  side->version.written_at = to.written_at;
  show_tables(side);
  return SK_OK;
}

void give_back_left(const Batch& batch, Base* base) {
  for (size_t t = 0; t < batch.tables.size(); ++t) base->spare[t].give_back(batch.tables[t].left);
}

void give_back_taken(const Batch& batch, Base* base) {
  for (size_t t = 0; t < batch.tables.size(); ++t) base->spare[t].give_back(batch.tables[t].taken);
}

}  // namespace sparsekit::serving
