// Helpers for the kernels on many tables. They send descriptors to the device, compute prefix sums
// in a single block, and search these sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cuda/prefix_sum.cuh"
#include "cuda/simt.cuh"
#include "sparsekit/arena.h"

namespace sparsekit::cuda {

constexpr int kGroupThreads = 256;
// Minimum number of resident blocks per multiprocessor. With this hint, ptxas uses a few more
// registers instead of spilling.
constexpr int kGroupBlocksAtOnce = 2;

// Descriptors that are passed as the parameter of a launch, and the place in device memory to which
// the kernel moves them. The parameters of a launch take 4 KB, which every driver supports, or 32
// KB if there are more descriptors.
template <int kWords>
struct Parcel {
  using Word = simt::Vec<uint64_t, 2>;

  Word words[kWords];
  Word* to;
  int32_t count;

  // Copies `bytes` bytes, or as many as fit. Returns their number.
  size_t pack(const char* from, size_t bytes, char* device) {
    const size_t size = std::min(bytes, sizeof words);
    std::memcpy(words, from, size);
    to = reinterpret_cast<Word*>(device);
    count = static_cast<int32_t>(size / sizeof(Word));
    return size;
  }

  SPARSEKIT_DEVICE void move(int64_t i) const {
    if (i < count) to[i] = words[i];
  }
  // In a launch of a single block: moves all descriptors, which the block may then read.
  SPARSEKIT_DEVICE void unpack() const {
    for (int i = simt::thread(); i < count; i += simt::block_size()) move(i);
    simt::barrier();
  }
};
using Little = Parcel<252>;
using Much = Parcel<2044>;

// Parcels that leave space for other parameters of their launch.
constexpr size_t kOtherParameters = 60 * sizeof(Much::Word);
using LittleExtra = Parcel<252 - 60>;
using MuchExtra = Parcel<2044 - 60>;

template <class Words>
SPARSEKIT_KERNEL bring_kernel(SPARSEKIT_GRID_CONSTANT(Words) parcel) {
  parcel.move(simt::global_thread());
}

using DescriptorArena = BasicArena<16>;

// Returns a grid with the single block that sum_up() requires.
inline simt::Grid one_block() {
  return sum_grid(1);
}

// Arrays of descriptors that are sent to the device together. They are passed as parameters of one
// launch or, if there are many tables, of a few launches. Unlike a copy, a launch needs no
// page-locked memory, does not wait, and can be captured in a CUDA graph.
class Descriptors {
 public:
  // Returns the size in bytes of an array with n elements.
  template <class D>
  static int64_t bytes(int64_t n) {
    DescriptorArena arena;
    arena.take<D>(n);
    return arena.bytes();
  }

  // `device` is the address of the first array; each further array directly follows the previous
  // one. add() returns the device address of the array that it adds.
  explicit Descriptors(const void* device)
      : device_(static_cast<char*>(const_cast<void*>(device))) {}

  template <class D>
  const D* add(const std::vector<D>& array) {
    const size_t at = bytes_.size();
    bytes_.resize(at + static_cast<size_t>(bytes<D>(static_cast<int64_t>(array.size()))));
    if (!array.empty()) std::memcpy(bytes_.data() + at, array.data(), array.size() * sizeof(D));
    return reinterpret_cast<const D*>(device_ + at);
  }

  // Returns the bytes of all arrays. If another object adds them as a single array, each one keeps
  // its place among them.
  const std::vector<char>& all() const { return bytes_; }

  // Maximum number of bytes of a launch by send(), and of one by send_with().
  static constexpr size_t kMostAlone = sizeof(Much::words), kMostAlong = sizeof(MuchExtra::words);

  // Sends the arrays by launches of their own.
  void send(void* stream) const {
    if (bytes_.size() <= sizeof(Little::words)) {
      send_by<Little>(stream, 0, bytes_.size());
    } else {
      send_by<Much>(stream, 0, bytes_.size());
    }
  }

  // Sends the arrays along with a launch of a single block. Its kernel, `few` or `many`, must first
  // unpack() its first parameter. Arrays that this parameter cannot hold are sent ahead.
  template <class First, class Other, class... Parameters, class... Arguments>
  void send_with(const char* name, void (*few)(First, Parameters...),
                 void (*many)(Other, Parameters...), void* stream,
                 const Arguments&... arguments) const {
    static_assert((sizeof(Parameters) + ...) <= kOtherParameters);
    const auto send_rest = [&](auto kernel, auto parcel, size_t begin) {
      parcel.pack(bytes_.data() + begin, bytes_.size() - begin, device_ + begin);
      simt::launch(name, kernel, one_block(), stream, parcel, arguments...);
    };
    if (bytes_.size() <= sizeof(LittleExtra::words)) return send_rest(few, LittleExtra{}, 0);
    const size_t ahead = bytes_.size() - std::min(bytes_.size(), kMostAlong);
    send_by<Much>(stream, 0, ahead);
    send_rest(many, MuchExtra{}, ahead);
  }

 private:
  template <class Words>
  void send_by(void* stream, size_t begin, size_t end) const {
    while (begin < end) {
      Words parcel;
      const size_t size = parcel.pack(bytes_.data() + begin, end - begin, device_ + begin);
      simt::launch("group: descriptors", bring_kernel<Words>, simt::grid_for(parcel.count), stream,
                   parcel);
      begin += size;
    }
  }

  char* device_;
  std::vector<char> bytes_;
};

// Fills in the fields that every kind of feature descriptor has, and sets the first bag of the next
// feature.
template <class Bags, class Described>
void describe_bags(const Bags& of, Described& feature, Described& next) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  feature.stride = of.stride;
  feature.sample_weights = of.sample_weights;
  feature.key_start = of.key_start;
  feature.table = static_cast<int32_t>(of.table);
  feature.num_keys = static_cast<int32_t>(std::min(of.num_keys, kMost));
  feature.combiner = static_cast<decltype(feature.combiner)>(of.combiner);
  next.first_bag = feature.first_bag + static_cast<int32_t>(of.num_bags);
}

// Calls put(i, of(0) + ... + of(i - 1)) for each i in [0, n].
template <class Of, class Put>
SPARSEKIT_DEVICE void sum_up(int n, const Of& of, const Put& put) {
  const int run = (n + simt::block_size() - 1) / simt::block_size();
  const auto within = [&](int i) { return i < n ? i : n; };
  const int begin = within(simt::thread() * run), end = within(begin + run);
  int64_t sum = 0;
  for (int i = begin; i < end; ++i) sum += of(i);
  sum = sum_before(sum);
  for (int i = begin; i < end; ++i) {
    put(i, sum);
    sum += of(i);
  }
  if (simt::thread() + 1 == simt::block_size()) put(n, sum);
}

// Returns the last i in [0, count) with at(i) <= value, or 0 if there is none. at(i) must not
// decrease as i grows.
template <class At>
SPARSEKIT_DEVICE int last_up_to(int64_t value, int count, const At& at) {
  int first = 0;
  while (count > 1) {
    const int half = count / 2;
    if (at(first + half) <= value) first += half;
    count -= half;
  }
  return first;
}

}  // namespace sparsekit::cuda
