// Defines all ops of sparsekit. A trailing underscore marks an op that changes the arguments
// written as `Tensor(x!)`. sparsekit/ops/ documents each op.
//
// If num_keys is given, an op uses only the first num_keys keys. Instead of num_keys, update_rows_
// has num_grads, with one number per table. Kernels read num_keys and num_grads from device memory,
// so ops can follow one another without waiting for the host.
#include "device_context.h"

namespace {

constexpr const char* kSchemas[] = {
    "hash_table_clear_(Tensor(a!) buckets) -> ()",
    "hash_table_find(Tensor buckets, Tensor hash_seed, Tensor keys, Tensor? num_keys=None)"
    " -> Tensor",
    "hash_table_find_or_insert_(Tensor(a!) buckets, Tensor hash_seed, Tensor(b!) size,"
    " Tensor keys, int capacity, Tensor? num_keys=None) -> (Tensor rows, Tensor status)",
    "hash_table_keys(Tensor buckets, Tensor hash_seed, Tensor size) -> Tensor",
    "hash_table_copy_(Tensor(a!) to, Tensor buckets, Tensor hash_seed, int rows) -> ()",
    "hash_table_renumber_(Tensor(a!) buckets, Tensor hash_seed, Tensor new_rows) -> ()",
    "compact_rows(Tensor gone, SymInt size) -> Tensor",
    "lowest_rows(Tensor scores, Tensor buckets, int size, int kind, int halve_every, int now,"
    " Tensor pinned, int count) -> (Tensor rows, Tensor orders, Tensor keys)",
    "move_rows_(Tensor(a!)[] tensors, Tensor new_rows, int left, Tensor[] initial) -> ()",

    "unique(Tensor keys) -> (Tensor unique, Tensor inverse, Tensor counts)",
    "unique_padded(Tensor keys, Tensor? num_keys=None) -> (Tensor unique, Tensor inverse,"
    " Tensor counts, Tensor num_unique)",

    "unsorted_segment_sum(Tensor data, Tensor segment_ids, SymInt num_segments,"
    " bool deterministic=True) -> Tensor",

    "bucketize(Tensor keys, int world_size, Tensor? owners=None, Tensor? num_keys=None)"
    " -> (Tensor by_owner, Tensor counts, Tensor permutation)",

    "gather_rows(Tensor table, Tensor rows) -> Tensor",

    "hash_integers(Tensor values, bool is_unsigned, int seed) -> Tensor",

    "embedding_bag(Tensor weight, Tensor rows, Tensor offsets, int combiner,"
    " Tensor? sample_weights=None) -> Tensor",
    "embedding_bag_backward(Tensor grad, Tensor rows, Tensor offsets, int combiner,"
    " Tensor? sample_weights, SymInt num_rows, bool deterministic=True) -> Tensor",
    "embedding_bag_backward_sample_weights(Tensor grad, Tensor weight, Tensor rows,"
    " Tensor offsets, int combiner, Tensor sample_weights) -> Tensor",

    "init_rows_(Tensor(a!) out, Tensor keys, Tensor? rows, Tensor? status, int seed,"
    " int distribution, float a, float b) -> ()",

    // A stand-in for a list of tensors: where ops on many tables take a list with one or several
    // tensors per table, they also take a list whose only item is the stand-in; see kept_list.h.
    // Autograd and the compiler do not know what it represents.
    "kept_list(Tensor[] tensors) -> Tensor",
    "words_of(Tensor[] words) -> Tensor",

    // Ops on many tables. sparsekit/ops/_group.py explains tables, initializers and features.
    "group_find(Tensor[] buckets, Tensor[] hash_seeds, Tensor tables, Tensor[] keys,"
    " Tensor[] offsets, Tensor features, Tensor(a!)? report=None)"
    " -> (Tensor rows, Tensor bags, Tensor key_starts)",
    "group_find_or_insert_(Tensor(a!)[] buckets, Tensor[] hash_seeds, Tensor(b!)[] sizes,"
    " Tensor(c!)[] weights, Tensor[] seeds, Tensor tables, Tensor initializers, Tensor[] keys,"
    " Tensor[] offsets, Tensor features, Tensor(d!)[] larger, Tensor(e!)? report=None)"
    " -> (Tensor rows, Tensor inverse, Tensor counts, Tensor bags, Tensor key_starts)",
    "group_bucketize(Tensor[] owners, int[] maps, int[] ends, Tensor[] keys, Tensor[] offsets,"
    " Tensor features, int world_size, bool distinct=True, int[] max_keys_per_rank=[])"
    " -> (Tensor keys, Tensor counts, Tensor numbers, Tensor inverse, Tensor places, Tensor bags,"
    " Tensor key_starts)",
    "group_exchange_rows(Tensor places, Tensor bags, Tensor features, Tensor come, int[] steps,"
    " Tensor? numbers=None) -> Tensor",
    "group_embedding_bag_out(Tensor like, int num_elements) -> Tensor",
    "group_embedding_bag_(Tensor(a!)[] outs, Tensor[] weights, Tensor index, Tensor? rows,"
    " Tensor? counts, Tensor bags, Tensor features, Tensor[] sample_weights, Tensor? key_starts,"
    " Tensor[] keys, Tensor[] seeds, Tensor? initializers) -> ()",
    "group_embedding_bag_backward(Tensor[] grads, int[] dims, Tensor index, Tensor? rows,"
    " Tensor counts, Tensor bags, Tensor features, Tensor[] sample_weights, Tensor? key_starts,"
    " int divisor=1, bool deterministic=True) -> (Tensor rows, Tensor grads, Tensor num_rows)",
    "group_embedding_bag_backward_at_(Tensor(a!) out, int[] row_strides, Tensor[] grads,"
    " int[] dims, Tensor index, Tensor rows, Tensor counts, Tensor bags, Tensor features,"
    " Tensor[] sample_weights, Tensor? key_starts, bool deterministic=True) -> ()",
    "group_embedding_bag_update_(Tensor[] grads, Tensor index, Tensor rows, Tensor counts,"
    " Tensor bags, Tensor features, Tensor[] sample_weights, Tensor? key_starts,"
    " Tensor(a!)[] weights, Tensor(b!)[] states, Tensor(c!)[] row_steps, Tensor(d!)[] steps,"
    " str rule, float[] settings, int divisor=1, bool per_row=False, int? rounding_seed=None,"
    " bool count_steps=False, bool deterministic=True, Tensor? lr=None) -> ()",
    "group_drop_lowest_(Tensor(a!)[] buckets, Tensor[] hash_seeds, Tensor(b!)[] sizes,"
    " Tensor(c!)[] tensors, Tensor[] initial, Tensor(d!)[] lists, Tensor tables)"
    " -> (Tensor dropped, Tensor lost)",
    "group_touch_(Tensor(a!)[] scores, Tensor index, Tensor rows, Tensor counts, Tensor bags,"
    " Tensor features, Tensor policies, Tensor(b!)[] clocks, Tensor? occurrences=None,"
    " int[] ticks=[]) -> ()",

    "update_rows_(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor(c!)[] row_steps,"
    " Tensor[] rows, Tensor[] grads, Tensor(d!)[] steps, str rule, float[] settings,"
    " bool per_row=False, int? rounding_seed=None, bool count_steps=False, Tensor? num_grads=None,"
    " Tensor? lr=None) -> ()",
    "catch_up_rows_(Tensor(a!) weight, Tensor(b!)[] states, Tensor(c!) row_step, Tensor? rows,"
    " Tensor numbers, int first_step, str rule, float[] settings) -> ()",
};

}  // namespace

SPARSEKIT_LIBRARY(m) {
  for (const char* schema : kSchemas) m.def(schema);
}
