#include "kept_list.h"

namespace sparsekit::ops {
namespace {

Tensor kept_list(const Tensors& tensors) {
  return KeptList::make(tensors);
}

#if !defined(SPARSEKIT_ENGINE_CUDA)
Tensor words_of(const Tensors& list) {
  const Views words(list);
  Arguments given("words_of");
  for (size_t i = 0; i < words.size(); ++i) given.read_word({"words", i}, words[i]);
  Tensor values =
      torch::stable::new_empty(list[0], {static_cast<int64_t>(words.size())}, ScalarType::Long);
  std::transform(words.begin(), words.end(), mutable_data<int64_t>(values),
                 [](const View& word) { return *int64_data(word); });
  return values;
}
#endif

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("kept_list", TORCH_BOX(&sparsekit::ops::kept_list));
#if !defined(SPARSEKIT_ENGINE_CUDA)
  m.impl("words_of", TORCH_BOX(&sparsekit::ops::words_of));
#endif
}
