// The extension module tiered._native: the I/O engine and the checksum, then what adam_bindings.cpp adds.
//
// 1. The GIL is released around everything that may block, and no thread of the engine ever takes it: completion comes
//    to Python as tokens that a Python thread fetches (tiered/io/engine.py). So nothing here can meet a dying
//    interpreter.
// 2. Addresses come as integers. Whoever passes one keeps the memory alive until the request is done.
// 3. std::invalid_argument becomes ValueError and std::logic_error RuntimeError; outcomes of I/O are values.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "crc32c.h"
#include "io_engine.h"

namespace nb = nanobind;

void bind_adam(nb::module_& module);

namespace {

using tiered::Fault;
using tiered::IoEngine;
using tiered::Request;

using PieceTuple = std::tuple<std::uintptr_t, std::uint64_t, std::size_t, std::size_t>;

std::shared_ptr<Request> submit(IoEngine& engine, bool write, const std::vector<PieceTuple>& tuples,
                                std::uintptr_t records) {
  std::vector<tiered::Piece> pieces;
  pieces.reserve(tuples.size());
  for (const auto& [address, offset, nbytes, record] : tuples) {
    pieces.push_back({reinterpret_cast<unsigned char*>(address), offset, nbytes, record});
  }
  return engine.submit(write ? tiered::Op::write : tiered::Op::read, std::move(pieces),
                       reinterpret_cast<tiered::PieceRecord*>(records));
}

const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::system:
      return "system";
    case Fault::short_end:
      return "short_end";
    case Fault::checksum:
      return "checksum";
    case Fault::invalid:
      return "invalid";
    case Fault::stalled:
      return "stalled";
    case Fault::refused:
      return "refused";
    case Fault::none:
      break;
  }
  return "none";
}

using FailureTuple = std::tuple<const char*, int, std::size_t, double>;

std::optional<FailureTuple> failure(const Request& request) {
  const tiered::Failure failure = request.failure();
  if (!failure.failed()) return std::nullopt;
  return FailureTuple{name_of(failure.fault), failure.error, failure.piece, failure.seconds};
}

auto late(const IoEngine& engine, double seconds) {
  std::vector<std::tuple<std::uint64_t, bool, std::uint64_t, std::size_t, double>> found;
  for (const tiered::Late& each : engine.late(seconds)) {
    found.emplace_back(each.id, each.op == tiered::Op::write, each.offset, each.nbytes, each.seconds);
  }
  return found;
}

auto troubles(IoEngine& engine) {
  std::vector<std::tuple<const char*, int, std::uint64_t, std::size_t>> found;
  for (const tiered::Trouble& each : engine.troubles()) {
    found.emplace_back(name_of(each.failure.fault), each.failure.error, each.offset, each.nbytes);
  }
  return found;
}

void bind_io(nb::module_& module) {
  nb::class_<Request>(module, "Request")
      .def("done", &Request::done)
      .def("wait", &Request::wait, nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>())
      .def("failure", &failure)
      .def("stranded", &Request::stranded)
      .def("notify", &Request::notify, nb::arg("token"));

  nb::class_<IoEngine>(module, "IoEngine")
      .def(nb::init<int, int, unsigned, std::size_t>(), nb::arg("buffered_fd"), nb::arg("direct_fd"),
           nb::arg("threads"), nb::arg("piece_bytes"))
      .def("submit", &submit, nb::arg("write"), nb::arg("pieces"), nb::arg("records"))
      .def("next_notification", &IoEngine::next_notification, nb::call_guard<nb::gil_scoped_release>())
      .def("late", &late, nb::arg("seconds"))
      .def("replace", &IoEngine::replace, nb::arg("id"))
      .def("give_up", &IoEngine::give_up, nb::arg("id"))
      .def("troubles", &troubles)
      .def("close", &IoEngine::close, nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>())
      .def("counters", [](const IoEngine& engine) {
        const tiered::Counters counters = engine.counters();
        return std::make_tuple(counters.bytes_read, counters.bytes_written, counters.busy_seconds, counters.retries,
                               counters.stalls);
      });

  const auto checksum = [](std::uintptr_t address, std::size_t nbytes, std::uint32_t crc) {
    return tiered::crc32c(reinterpret_cast<const void*>(address), nbytes, crc);
  };
  const auto portable = [](std::uintptr_t address, std::size_t nbytes, std::uint32_t crc) {
    return tiered::crc32c_portable(reinterpret_cast<const void*>(address), nbytes, crc);
  };
  module.def("crc32c", checksum, nb::arg("address"), nb::arg("nbytes"), nb::arg("crc") = 0);
  module.def("crc32c_portable", portable, nb::arg("address"), nb::arg("nbytes"), nb::arg("crc") = 0);
  // The address of the three function pointers under every transfer (file.h), for tests and measurements.
  module.def("file_calls", [] { return reinterpret_cast<std::uintptr_t>(&tiered::file_calls()); });
  module.def("crc32c_hardware", &tiered::crc32c_hardware);
}

}  // namespace

NB_MODULE(_native, module) {
  // Objects that live in a user's globals at exit are no leak worth printing.
  nb::set_leak_warnings(false);
  bind_io(module);
  bind_adam(module);
}
