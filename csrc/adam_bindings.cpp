// Exposes adam.h to tiered/optim/kernels.py, which has checked every argument: tensors arrive as addresses.
//
// The GIL is released while the kernels run; the Python caller keeps the tensors alive until the call returns.
#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "adam.h"

namespace nb = nanobind;

namespace {

using Address = uintptr_t;
using Array = std::pair<Address, int>;                 // address, DType
using Sources = std::pair<std::vector<Address>, int>;  // addresses, their DType
using State = std::tuple<Address, Address, Address>;   // master, exp_avg, exp_avg_sq
// The fields of AdamUpdate, in its order.
using Update = std::tuple<int64_t, int64_t, double, double, double, bool, double, double, double, double, double>;

tiered::Isa chosen_isa() {
  static const tiered::Isa isa = tiered::isa_from_environment();
  return isa;
}

// Until Python 3.14, a thread that asks for the GIL of an interpreter that is shutting down is unwound by pthread_exit,
// and the first noexcept frame, as in a destructor that releases a lock, ends the whole process by std::terminate. Such
// a thread (a daemon thread that was computing at exit) sleeps here instead, as 3.14 lets it.
void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (abi::__forced_unwind&) {
    while (true) pause();
  }
}

// Runs work() without the GIL.
template <class Work>
auto without_gil(const Work& work) {
  PyThreadState* state = PyEval_SaveThread();
  try {
    const auto result = work();
    take_gil(state);
    return result;
  } catch (const std::exception&) {
    take_gil(state);
    throw;
  }
}

tiered::ArrayRef array_ref(const Array& array) {
  return {reinterpret_cast<void*>(array.first), static_cast<tiered::DType>(array.second)};
}

tiered::AdamUpdate update_of(const Update& fields) {
  return std::apply(
      [](int64_t start, int64_t stop, double grad_scale, double decay, double lerp, bool lerp_from_grad, double beta2,
         double grad_sq_weight, double bias2_sqrt, double eps, double step_size) {
        return tiered::AdamUpdate{start,
                                  stop,
                                  static_cast<float>(grad_scale),
                                  static_cast<float>(decay),
                                  static_cast<float>(lerp),
                                  lerp_from_grad,
                                  static_cast<float>(beta2),
                                  static_cast<float>(grad_sq_weight),
                                  static_cast<float>(bias2_sqrt),
                                  static_cast<float>(eps),
                                  static_cast<float>(step_size)};
      },
      fields);
}

void adamw(const std::vector<Update>& fields, const State& state, const Array& grad, const std::optional<Array>& out,
           int threads) {
  const tiered::Isa isa = chosen_isa();
  const tiered::ArrayRef grad_ref = array_ref(grad);
  const tiered::ArrayRef out_ref = out ? array_ref(*out) : tiered::ArrayRef{nullptr, tiered::DType::fp32};
  const tiered::AdamArrays arrays{reinterpret_cast<float*>(std::get<0>(state)),
                                  reinterpret_cast<float*>(std::get<1>(state)),
                                  reinterpret_cast<float*>(std::get<2>(state)),
                                  grad_ref.data,
                                  grad_ref.type,
                                  out_ref.data,
                                  out_ref.type};
  without_gil([&] {
    std::vector<tiered::AdamUpdate> updates;
    updates.reserve(fields.size());
    for (const Update& one : fields) updates.push_back(update_of(one));
    tiered::adamw(updates.data(), updates.size(), arrays, isa, threads);
    return true;
  });
}

double accumulate(const Array& dst, const Array& src, int64_t n, bool add, int threads) {
  const tiered::Isa isa = chosen_isa();
  return without_gil([&] { return tiered::accumulate(array_ref(dst), array_ref(src), n, add, isa, threads); });
}

double average(const Array& dst, const Sources& sources, int64_t n, int divisor, bool add, int threads) {
  const tiered::Isa isa = chosen_isa();
  return without_gil([&] {
    std::vector<const void*> arrays;
    arrays.reserve(sources.first.size());
    for (Address address : sources.first) arrays.push_back(reinterpret_cast<const void*>(address));
    const tiered::MeanSources mean{arrays.data(), static_cast<int>(arrays.size()),
                                   static_cast<tiered::DType>(sources.second), divisor};
    return tiered::average(array_ref(dst), mean, n, add, isa, threads);
  });
}

double sum_of_squares(const Array& array, int64_t n, int threads) {
  const tiered::Isa isa = chosen_isa();
  return without_gil([&] { return tiered::sum_of_squares(array_ref(array), n, isa, threads); });
}

}  // namespace

void bind_adam(nb::module_& m) {
  m.def("adamw", &adamw, nb::arg("updates"), nb::arg("state"), nb::arg("grad"), nb::arg("param_out").none(),
        nb::arg("threads"));
  m.def("accumulate", &accumulate, nb::arg("dst"), nb::arg("src"), nb::arg("n"), nb::arg("add"), nb::arg("threads"));
  m.def("average", &average, nb::arg("dst"), nb::arg("sources"), nb::arg("n"), nb::arg("divisor"), nb::arg("add"),
        nb::arg("threads"));
  m.def("sum_of_squares", &sum_of_squares, nb::arg("array"), nb::arg("n"), nb::arg("threads"));
  m.def(
      "isa", [] { return std::string(tiered::isa_name(chosen_isa())); },
      "The instruction set in use; ValueError if TIERED_ISA names one that is unknown or missing here.");
}
