// The rows of a table with the largest dot products with a query.
#pragma once

#include <cstdint>

#include "serving/pool_kernels.h"
#include "serving/version.h"

namespace sparsekit::serving {

// Finds the k rows with the highest scores: writes their keys [k] and scores [k], best first, ties
// in ascending order of keys, and returns their number, which is below k if the table has fewer
// rows. The padding key's row and rows that unknown keys share are left out, and so are rows whose
// score is NaN (infinities in a row and overflow can cause this). Throws std::bad_alloc.
// Precondition: query [dim] is finite, and k > 0.
//
// The score of a row is the same number on every machine: with its vector v, as lookups return it,
// and all operations in float,
//     lane[i] = the sum of query[j] * v[j] for j = i, i + 16, i + 32, ..., in this order
// for i in [0, 16), and then lane[i] += lane[i + 8] for i in [0, 8), lane[i] += lane[i + 4] for i
// in [0, 4), and so on; the score is lane[0].
//
// int8 and int4 rows are first multiplied as integers, which gives an upper bound for each score.
// The score itself is computed only if the bound reaches the k-th best score so far; the result is
// the same as if all scores were computed.
int32_t top_k(const PoolKernels& kernels, const TableView& table, const float* query, int32_t k,
              int64_t* keys, float* scores);

}  // namespace sparsekit::serving
