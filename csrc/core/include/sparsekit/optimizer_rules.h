// The update of one element of a row, for each optimizer. Both engines, CPU and CUDA, use this
// code.
//
// A rule is a struct of the optimizer's settings with
//   kStates       number of states; each has one element for each element of the weight;
//   kRowWise      true if the last state has one number for a whole row instead;
//   kRowMeans     number of means over a row that step() depends on, up to two;
//   kPerRow       true if a row may count its own steps;
//   StepConstants<A>    struct of the numbers shared by all elements in a step;
//   at<A>(t)      returns the StepConstants of step t >= 1;
//   step(...)     makes the step for one element: gradient g, weight w, states s[kStates].
// A rule with means also has
//   kMeansReadWeight, kMeansReadStates   true if the means also depend on the weight or the states;
//   of_element(k, g, w, s)               returns the terms to average; s is a copy to work on;
//   of_row(k, means, before)             returns a number for the whole row, which step() finds in
//                                        s after the element's states; with kRowWise, it is the
//                                        row's new state, and `before` is the old state.
// A rule that also moves rows without a gradient has the members that catch_up_rows needs:
//   without_gradient(a, b)  returns the StepConstants of a missed step, given its two numbers;
//   most_replayed()         returns the number of missed steps worth replaying: at equal learning
//                           rates, all later steps together would move a weight by less than 2^-53
//                           of the move in the first step;
//   decay(k, steps)         returns the factor by which `steps` missed steps shrink state k.
// A is the type used for arithmetic on rows. Expressions are evaluated in the same order as in
// torch.optim.
#pragma once

#include <cmath>
#include <cstdint>

#include "sparsekit/decay.h"
#include "sparsekit/host_device.h"
#include "sparsekit/learning_rate.h"

namespace sparsekit {

// Number of states with as many elements as the weight.
template <class Rule>
constexpr int kElementStates = Rule::kStates - (Rule::kRowWise ? 1 : 0);

// The terms that a rule averages over a row, or their means. They are 0 for a row without elements.
// This is a struct rather than an array, which would cost the CUDA kernel 6 registers.
template <class A>
struct RowMeans {
  A first, second;
};

// g += weight_decay w;   without momentum w -= lr g;
// with momentum, b = momentum b + g and w -= lr (nesterov ? g + momentum b : b).
// This is torch.optim.SGD without dampening. See Sutskever et al., "On the importance of
// initialization and momentum in deep learning", ICML 2013.
template <bool kMomentum>
struct Sgd {
  static constexpr int kStates = kMomentum ? 1 : 0;
  static constexpr bool kRowWise = false;
  static constexpr int kRowMeans = 0;
  static constexpr bool kPerRow = false;
  Rate lr;
  double momentum, weight_decay;
  bool nesterov;

  template <class A>
  struct StepConstants {
    A lr, momentum, weight_decay;
    bool nesterov;
  };
  template <class A>
  SPARSEKIT_HOST_DEVICE StepConstants<A> at(int64_t) const {
    return {static_cast<A>(lr), static_cast<A>(momentum), static_cast<A>(weight_decay), nesterov};
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static void step(const StepConstants<A>& k, A g, A& w, A* s) {
    if (k.weight_decay != 0) g += k.weight_decay * w;
    if constexpr (kMomentum) {
      s[0] = k.momentum * s[0] + g;
      g = k.nesterov ? g + k.momentum * s[0] : s[0];
    }
    w -= k.lr * g;
  }

  // The first number of a missed step is the learning rate; the second is not used.
  template <class A>
  SPARSEKIT_HOST_DEVICE StepConstants<A> without_gradient(double step_lr, double) const {
    return {static_cast<A>(step_lr), static_cast<A>(momentum), A{0}, nesterov};
  }
  int64_t most_replayed() const { return steps_to_vanish(momentum); }
  template <class A>
  SPARSEKIT_HOST_DEVICE A decay(int, int64_t steps) const {
    return static_cast<A>(power_of(momentum, steps));
  }
};

// m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2,   with kAmsgrad x = max(x, v),
// w = (1 - lr weight_decay) w - lr sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v or x) + eps_t).
// By default, eps_t = eps, as at the end of section 2 of Kingma and Ba, "Adam", ICLR 2015, and in
// torch.optim.SparseAdam. With rescale_eps, eps_t = eps sqrt(1 - beta2^t); the step is then the
// same as in algorithm 1 of that paper and in torch.optim.Adam. Weight decay follows Loshchilov and
// Hutter, "Decoupled weight decay regularization", ICLR 2019. x is from Reddi et al., "On the
// convergence of Adam and beyond", ICLR 2018.
template <bool kAmsgrad>
struct Adam {
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  static constexpr bool kRowWise = false;
  static constexpr int kRowMeans = 0;
  static constexpr bool kPerRow = true;
  Rate lr;
  double beta1, beta2, eps, weight_decay;
  bool rescale_eps;

  template <class A>
  struct StepConstants {
    A step_size, eps, beta1, rest1, beta2, rest2, keep;
  };
  template <class A>
  SPARSEKIT_HOST_DEVICE StepConstants<A> constants(double step_size, double step_eps,
                                                   double keep) const {
    return {static_cast<A>(step_size), static_cast<A>(step_eps), static_cast<A>(beta1),
            static_cast<A>(1 - beta1), static_cast<A>(beta2),    static_cast<A>(1 - beta2),
            static_cast<A>(keep)};
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE StepConstants<A> at(int64_t t) const {
    const double root = std::sqrt(1 - std::pow(beta2, static_cast<double>(t)));
    const double rate = lr;
    const double step_size = rate * root / (1 - std::pow(beta1, static_cast<double>(t)));
    return constants<A>(step_size, rescale_eps ? eps * root : eps, 1 - rate * weight_decay);
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static void step(const StepConstants<A>& k, A g, A& w, A* s) {
    s[0] = k.beta1 * s[0] + k.rest1 * g;
    s[1] = k.beta2 * s[1] + k.rest2 * g * g;
    A v = s[1];
    if constexpr (kAmsgrad) {
      // This order of operands keeps a NaN in v.
      s[2] = s[2] > v ? s[2] : v;
      v = s[2];
    }
    w = w * k.keep - k.step_size * (s[0] / (std::sqrt(v) + k.eps));
  }

  // Returns the constants of a step missed by a row, given that step's step size and epsilon.
  template <class A>
  SPARSEKIT_HOST_DEVICE StepConstants<A> without_gradient(double step_size, double step_eps) const {
    return constants<A>(step_size, step_eps, 1);
  }
  int64_t most_replayed() const {
    return beta1 == 0 ? 0 : steps_to_vanish(beta1 / std::sqrt(beta2));
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE A decay(int k, int64_t steps) const {
    return static_cast<A>(power_of(k == 0 ? beta1 : beta2, steps));
  }
};

// With lr_t = lr / (1 + (t - 1) lr_decay):
// v += g^2,   w -= lr_t * g / (sqrt(v) + eps).
// Weight decay is applied first: it adds weight_decay w to g or, if decoupled, multiplies w by
// 1 - lr_t weight_decay. See torch.optim.Adagrad and Duchi, Hazan and Singer, "Adaptive subgradient
// methods", JMLR 2011.
struct Adagrad {
  static constexpr int kStates = 1;
  static constexpr bool kRowWise = false;
  static constexpr int kRowMeans = 0;
  static constexpr bool kPerRow = false;
  Rate lr;
  double lr_decay, eps, weight_decay;
  bool decoupled;

  template <class A>
  struct StepConstants {
    A lr, eps, weight_decay, keep;
  };
  template <class A>
  SPARSEKIT_HOST_DEVICE StepConstants<A> at(int64_t t) const {
    const double rate = lr / (1 + static_cast<double>(t - 1) * lr_decay);
    return {static_cast<A>(rate), static_cast<A>(eps), static_cast<A>(decoupled ? 0 : weight_decay),
            static_cast<A>(decoupled ? 1 - rate * weight_decay : 1)};
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static A decayed(const StepConstants<A>& k, A g, A w) {
    return k.weight_decay != 0 ? g + k.weight_decay * w : g;
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static void step(const StepConstants<A>& k, A g, A& w, A* s) {
    g = decayed(k, g, w);
    s[0] += g * g;
    w = w * k.keep - k.lr * (g / (std::sqrt(s[0]) + k.eps));
  }
};

// Adagrad with a single v per row, which accumulates the mean of g^2 over the row. This is FBGEMM's
// EXACT_ROWWISE_ADAGRAD. Weight decay is applied only if kL2 is true; a flag at run time would cost
// the CUDA kernel 6 to 20 registers.
template <bool kL2>
struct RowWiseAdagrad : Adagrad {
  static constexpr bool kRowWise = true;
  static constexpr int kRowMeans = 1;
  static constexpr bool kMeansReadWeight = kL2;
  static constexpr bool kMeansReadStates = false;
  template <class A>
  SPARSEKIT_HOST_DEVICE static RowMeans<A> of_element(const StepConstants<A>& k, A g, A w, A*) {
    if constexpr (kL2) g = decayed(k, g, w);
    return {g * g, A{0}};
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static A of_row(const StepConstants<A>&, const RowMeans<A>& means,
                                        A before) {
    return before + means.first;
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static void step(const StepConstants<A>& k, A g, A& w, A* s) {
    if constexpr (kL2) g = decayed(k, g, w);
    w = w * k.keep - k.lr * (g / (std::sqrt(s[0]) + k.eps));
  }
};

// v = alpha v + (1 - alpha) g^2, and with d = sqrt(v) + eps, or sqrt(v + eps) with eps_inside:
//   without momentum               w -= lr g / d;
//   with momentum                  b = momentum b + g / d,      w -= lr b   (torch.optim.RMSprop);
//   with momentum and eps_inside   b = momentum b + lr g / d,   w -= b      (TensorFlow's RMSProp).
// Weight decay is applied first: it adds weight_decay w to g or, if decoupled, multiplies w by
// 1 - lr weight_decay. See Tieleman and Hinton, lecture 6.5 of "Neural networks for machine
// learning", 2012.
template <bool kMomentum>
struct RmsProp {
  static constexpr int kStates = kMomentum ? 2 : 1;
  static constexpr bool kRowWise = false;
  static constexpr int kRowMeans = 0;
  static constexpr bool kPerRow = false;
  Rate lr;
  double alpha, eps, momentum;
  bool eps_inside;
  double weight_decay;
  bool decoupled;

  template <class A>
  struct StepConstants {
    A lr, alpha, rest, inside, outside, momentum, before, after, weight_decay, keep;
  };
  template <class A>
  SPARSEKIT_HOST_DEVICE StepConstants<A> at(int64_t) const {
    const double rate = lr;
    return {static_cast<A>(rate),
            static_cast<A>(alpha),
            static_cast<A>(1 - alpha),
            static_cast<A>(eps_inside ? eps : 0),
            static_cast<A>(eps_inside ? 0 : eps),
            static_cast<A>(momentum),
            static_cast<A>(eps_inside ? rate : 1),
            static_cast<A>(eps_inside ? 1 : rate),
            static_cast<A>(decoupled ? 0 : weight_decay),
            static_cast<A>(decoupled ? 1 - rate * weight_decay : 1)};
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static void step(const StepConstants<A>& k, A g, A& w, A* s) {
    if (k.weight_decay != 0) g += k.weight_decay * w;
    s[0] = k.alpha * s[0] + k.rest * g * g;
    const A scaled = g / (std::sqrt(s[0] + k.inside) + k.outside);
    if constexpr (kMomentum) {
      s[1] = k.momentum * s[1] + k.before * scaled;
      w = w * k.keep - k.after * s[1];
    } else {
      w = w * k.keep - k.lr * scaled;
    }
  }
};

// With p = -lr_power:   n' = n + g^2,   z += g - (n'^p - n^p) / lr * w,
// w = |z| <= l1 ? 0 : (sign(z) l1 - z) / (n'^p / lr + 2 l2).
// This is algorithm 1 of McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013.
// l2 is defined as in TensorFlow: it adds l2 w^2 to the loss, while the paper's lambda_2 adds
// lambda_2 w^2 / 2. If lr is 0, as it may be at the beginning or end of a schedule, nothing
// changes.
struct Ftrl {
  static constexpr int kStates = 2;  // the states n and z
  static constexpr bool kRowWise = false;
  static constexpr int kRowMeans = 0;
  static constexpr bool kPerRow = false;
  Rate lr;
  double l1, l2, lr_power;

  template <class A>
  struct StepConstants {
    A lr, l1, l2, power;
    bool root;
  };
  template <class A>
  SPARSEKIT_HOST_DEVICE StepConstants<A> at(int64_t) const {
    return {static_cast<A>(lr), static_cast<A>(l1), static_cast<A>(2 * l2),
            static_cast<A>(-lr_power), lr_power == -0.5};
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static A power(const StepConstants<A>& k, A n) {
    return k.root ? std::sqrt(n) : std::pow(n, k.power);
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static void step(const StepConstants<A>& k, A g, A& w, A* s) {
    if (k.lr == 0) return;
    const A before = power(k, s[0]);
    s[0] += g * g;
    const A after = power(k, s[0]);
    s[1] += g - (after - before) / k.lr * w;
    const A z = s[1];
    // Test for `<=`, not for `>`, so that a NaN does not become zero.
    w = std::abs(z) <= k.l1 ? A{0} : ((z < 0 ? -k.l1 : k.l1) - z) / (after / k.lr + k.l2);
  }
};

// Adam with a single v per row: v = beta2 v + (1 - beta2) * (mean of g^2 over the row). This is
// FBGEMM's PARTIAL_ROWWISE_ADAM, with rescale_eps.
struct PartialRowWiseAdam : Adam<false> {
  static constexpr bool kRowWise = true;
  static constexpr int kRowMeans = 1;
  static constexpr bool kMeansReadWeight = false;
  static constexpr bool kMeansReadStates = false;
  template <class A>
  SPARSEKIT_HOST_DEVICE static RowMeans<A> of_element(const StepConstants<A>&, A g, A, A*) {
    return {g * g, A{0}};
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static A of_row(const StepConstants<A>& k, const RowMeans<A>& means,
                                        A before) {
    return k.beta2 * before + k.rest2 * means.first;
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static void step(const StepConstants<A>& k, A g, A& w, A* s) {
    s[0] = k.beta1 * s[0] + k.rest1 * g;
    w = w * k.keep - k.step_size * (s[0] / (std::sqrt(s[1]) + k.eps));
  }
};

// With m and v as in Adam, m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t):
// u = m' / (sqrt(v') + eps) + weight_decay w,   w -= lr |w| / |u| * u,
// where |x| is the norm of a row, and |w| / |u| is taken as 1 if either is 0.
// This is algorithm 2 of You et al., "Large batch optimization for deep learning: training BERT in
// 76 minutes", ICLR 2020, with each row as a layer, as in FBGEMM's LAMB.
struct Lamb {
  static constexpr int kStates = 2;
  static constexpr bool kRowWise = false;
  static constexpr int kRowMeans = 2;
  static constexpr bool kMeansReadWeight = true;
  static constexpr bool kMeansReadStates = true;
  static constexpr bool kPerRow = true;
  Rate lr;
  double beta1, beta2, eps, weight_decay;

  template <class A>
  struct StepConstants {
    A lr, weight_decay;
    Adam<false>::StepConstants<A> adam;
  };
  template <class A>
  SPARSEKIT_HOST_DEVICE StepConstants<A> at(int64_t t) const {
    const Adam<false> adam{1, beta1, beta2, eps, 0, true};
    return {static_cast<A>(lr), static_cast<A>(weight_decay), adam.at<A>(t)};
  }
  // Updates the moments m and v, and returns u.
  template <class A>
  SPARSEKIT_HOST_DEVICE static A direction(const StepConstants<A>& k, A g, A w, A* s) {
    s[0] = k.adam.beta1 * s[0] + k.adam.rest1 * g;
    s[1] = k.adam.beta2 * s[1] + k.adam.rest2 * g * g;
    return k.adam.step_size * (s[0] / (std::sqrt(s[1]) + k.adam.eps)) + k.weight_decay * w;
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static RowMeans<A> of_element(const StepConstants<A>& k, A g, A w, A* s) {
    const A u = direction(k, g, w, s);
    return {w * w, u * u};
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static A of_row(const StepConstants<A>& k, const RowMeans<A>& means, A) {
    // A NaN fails both comparisons, so it propagates.
    if (means.first == 0 || means.second == 0) return k.lr;
    return k.lr * (std::sqrt(means.first) / std::sqrt(means.second));
  }
  template <class A>
  SPARSEKIT_HOST_DEVICE static void step(const StepConstants<A>& k, A g, A& w, A* s) {
    const A u = direction(k, g, w, s);
    w -= s[2] * u;
  }
};

// Instantiates function<Rule, T> for every rule and every dtype of rows.
#define SPARSEKIT_INSTANTIATE_RULES(function)                 \
  SPARSEKIT_INSTANTIATE_RULE(function, Sgd<false>)            \
  SPARSEKIT_INSTANTIATE_RULE(function, Sgd<true>)             \
  SPARSEKIT_INSTANTIATE_RULE(function, Adam<false>)           \
  SPARSEKIT_INSTANTIATE_RULE(function, Adam<true>)            \
  SPARSEKIT_INSTANTIATE_RULE(function, Adagrad)               \
  SPARSEKIT_INSTANTIATE_RULE(function, RowWiseAdagrad<false>) \
  SPARSEKIT_INSTANTIATE_RULE(function, RowWiseAdagrad<true>)  \
  SPARSEKIT_INSTANTIATE_RULE(function, RmsProp<false>)        \
  SPARSEKIT_INSTANTIATE_RULE(function, RmsProp<true>)         \
  SPARSEKIT_INSTANTIATE_RULE(function, Ftrl)                  \
  SPARSEKIT_INSTANTIATE_RULE(function, PartialRowWiseAdam)    \
  SPARSEKIT_INSTANTIATE_RULE(function, Lamb)

}  // namespace sparsekit
