// The Python face of the core, as io_daemon/_native.pyi describes it. No logic: arguments are
// converted, the GIL is released on every wait and every long memory operation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <tuple>

#include "bench_reactor.hpp"
#include "checksum.hpp"
#include "engine.hpp"
#include "error.hpp"
#include "file_space.hpp"
#include "halves.hpp"
#include "narrow.hpp"
#include "region.hpp"
#include "ring.hpp"
#include "squares.hpp"
#include "wire_layout.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace infinity {
namespace {

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Headers = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Item>
using Column = nb::ndarray<Item, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Item>
std::span<Item> as_span(const Column<Item>& items, std::size_t count) {
  if (items.size() != count) throw std::invalid_argument("the arrays differ in length");
  return {items.data(), count};
}

std::size_t narrow_bytes(std::size_t count) {
  if (count % kNarrowBlock != 0) throw std::invalid_argument("the values are no whole blocks");
  return count + count / kNarrowBlock;
}

std::span<const std::byte> as_span(const Bytes& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

std::size_t as_unsigned(std::int64_t value, const char* what) {
  if (value < 0) throw std::invalid_argument(std::string(what) + " is negative");
  return static_cast<std::size_t>(value);
}

void translate_errno(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const std::system_error& error) {
    // The pair (errno, message) lets OSError choose its subclass.
    const nb::tuple arguments = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

nb::dict wire_layout() {
  nb::dict structs;
  for (const auto& layout : wire::kStructs) {
    nb::dict fields;
    fields[""] = nb::make_tuple(layout.bytes, layout.alignment, 0);
    for (const auto& field : layout.fields) {
      fields[nb::str(field.name.data(), field.name.size())] =
          nb::make_tuple(field.offset, field.bytes, field.item_bytes);
    }
    structs[nb::str(layout.name.data(), layout.name.size())] = fields;
  }
  return structs;
}

nb::dict wire_constants() {
  nb::dict constants;
  for (const auto& constant : wire::kConstants) {
    constants[nb::str(constant.name.data(), constant.name.size())] = constant.value;
  }
  return constants;
}

nb::object region_array(const std::shared_ptr<Region>& region) {
  const nb::object owner = nb::cast(region);
  const std::size_t shape[] = {region->region_bytes()};
  auto* data = reinterpret_cast<std::uint8_t*>(region->data());
  if (region->writable()) {
    return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, 1, shape, owner));
  }
  return nb::cast(nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>(data, 1, shape, owner));
}

using SqeTuple = std::tuple<std::uint64_t, std::uint8_t, std::uint8_t, std::uint8_t, std::uint8_t,
                            std::uint32_t, std::uint64_t, std::uint8_t, std::uint8_t>;
using CqeTuple =
    std::tuple<std::uint64_t, std::uint32_t, std::int32_t, std::uint32_t, std::uint16_t,
               std::uint8_t, std::uint8_t, std::uint64_t, std::uint64_t, std::uint64_t>;

SqeTuple as_tuple(const wire::Sqe& e) {
  return {e.seq,   e.opcode, e.flags,      e.read_mask, e.write_mask,
          e.chunk, e.arg,    e.dirty_mask, e.dead_mask};
}

CqeTuple as_tuple(const wire::Cqe& e) {
  return {e.seq,  e.status,    e.error_number, e.chunk,    e.file,
          e.kind, e.born_mask, e.offset,       e.expected, e.actual};
}

// Waits without the GIL; a signal's Python handler runs in between, and may raise.
template <typename Entry>
int wait(Ring<Entry>& ring, int timeout_ms, int other_fd) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (true) {
    WaitResult result;
    {
      const nb::gil_scoped_release release;
      result = ring.wait(timeout_ms, other_fd);
    }
    if (result != WaitResult::kInterrupted) return static_cast<int>(result);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    timeout_ms = std::max(0, static_cast<int>(left.count()));
  }
}

// What both rings have in common.
template <typename Entry>
nb::class_<Ring<Entry>> bind_ring(nb::module_& module, const char* name) {
  using R = Ring<Entry>;
  nb::class_<R> ring(module, name, nb::is_final());
  ring.def_static("bytes_required", &R::bytes_required, "num_entries"_a)
      .def(
          "__init__",
          [](R* self, std::shared_ptr<Region> region, std::int64_t offset, std::int64_t num_entries,
             int wake_fd, bool create) {
            new (self) R(std::move(region), as_unsigned(offset, "offset"),
                         as_unsigned(num_entries, "num_entries"), wake_fd,
                         create ? RingOrigin::kCreate : RingOrigin::kAttach);
          },
          "region"_a, "offset"_a, "num_entries"_a, "wake_fd"_a, nb::kw_only(), "create"_a)
      .def("pop",
           [](R& self) -> std::optional<decltype(as_tuple(Entry{}))> {
             const auto entry = self.pop();
             if (!entry.has_value()) return std::nullopt;
             return as_tuple(*entry);
           })
      .def(
          "pop_batch",
          [](R& self, std::int64_t entries_max) {
            nb::list tuples;
            for (const Entry& entry : self.pop_batch(as_unsigned(entries_max, "entries_max"))) {
              tuples.append(as_tuple(entry));
            }
            return tuples;
          },
          "entries_max"_a)
      .def("prepare_sleep", &R::prepare_sleep)
      .def("wait", &wait<Entry>, "timeout_ms"_a, "other_fd"_a = -1)
      .def("__len__", &R::num_ready);
  return ring;
}

void bind_rings(nb::module_& module) {
  bind_ring<wire::Sqe>(module, "SubmissionRing")
      .def(
          "push",
          [](SubmissionRing& self, std::uint64_t seq, std::uint8_t opcode, std::uint8_t flags,
             std::uint8_t read_mask, std::uint8_t write_mask, std::uint32_t chunk,
             std::uint64_t arg, std::uint8_t dirty_mask, std::uint8_t dead_mask) {
            const wire::Sqe entry{seq,   opcode, flags,      read_mask, write_mask,
                                  chunk, arg,    dirty_mask, dead_mask, {}};
            return self.push({&entry, 1});
          },
          "seq"_a, "opcode"_a, "flags"_a, "read_mask"_a = 0, "write_mask"_a = 0, "chunk"_a = 0,
          "arg"_a = 0, "dirty_mask"_a = 0, "dead_mask"_a = 0);
  bind_ring<wire::Cqe>(module, "CompletionRing")
      .def(
          "push",
          [](CompletionRing& self, std::uint64_t seq, std::uint32_t status,
             std::int32_t error_number, std::uint32_t chunk, std::uint16_t file, std::uint8_t kind,
             std::uint8_t born_mask, std::uint64_t offset, std::uint64_t expected,
             std::uint64_t actual) {
            const wire::Cqe entry{seq,       status, error_number, chunk,  file, kind,
                                  born_mask, offset, expected,     actual, {}};
            return self.push({&entry, 1});
          },
          "seq"_a, "status"_a, "error_number"_a, "chunk"_a, "file"_a, "kind"_a, "born_mask"_a,
          "offset"_a, "expected"_a, "actual"_a);
}

// Unmapping and freeing a large region takes tens of milliseconds, and whoever drops it last,
// Python or an I/O thread, must not hold up all of Python meanwhile.
void delete_region(const Region* region) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    delete region;
    return;
  }
  const nb::gil_scoped_release release;
  delete region;
}

void bind_region(nb::module_& module) {
  nb::class_<Region>(module, "Region", nb::is_final())
      .def(nb::new_([](int fd, std::int64_t region_bytes, bool writable) {
             return std::shared_ptr<Region>(
                 new Region(fd, as_unsigned(region_bytes, "region_bytes"), writable),
                 delete_region);
           }),
           "fd"_a, "region_bytes"_a, nb::kw_only(), "writable"_a = true)
      .def_prop_ro("address",
                   [](const Region& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_prop_ro("region_bytes", &Region::region_bytes)
      .def_prop_ro("writable", &Region::writable)
      .def("array", &region_array)
      .def("prefault", &Region::prefault, "num_threads"_a, ReleaseGil())
      .def("lock", &Region::lock, ReleaseGil())
      .def("dont_fork", &Region::dont_fork)
      .def(
          "zero",
          [](const Region& self, std::int64_t offset, std::int64_t num_bytes) {
            self.zero(as_unsigned(offset, "offset"), as_unsigned(num_bytes, "num_bytes"));
          },
          "offset"_a, "num_bytes"_a, ReleaseGil());
}

IoOp as_op(int op) {
  if (op < static_cast<int>(IoOp::kRead) || op > static_cast<int>(IoOp::kWrite)) {
    throw std::invalid_argument("op is neither READ nor WRITE");
  }
  return static_cast<IoOp>(op);
}

template <typename R>
std::shared_ptr<R> make_reactor(
    const std::string& engine, std::int64_t queue_depth, std::int64_t block_bytes,
    const std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t>>& faults) {
  require(queue_depth > 0 && queue_depth <= kQueueDepthMax, "queue_depth is not in 1..4096");
  require(block_bytes > 0 && block_bytes <= kBlockBytesMax,
          "block_bytes is not a multiple of 4096 up to 2**30");
  const auto depth = static_cast<unsigned>(queue_depth);
  auto io_engine = make_engine(engine, depth);
  if (!faults.empty()) {
    std::vector<Fault> list;
    for (const auto& [what, nth, value] : faults) list.push_back({what, nth, value});
    io_engine = make_faulty_engine(std::move(io_engine), std::move(list));
  }
  return start_reactor(
      std::make_shared<R>(std::move(io_engine), depth, static_cast<std::uint32_t>(block_bytes)));
}

void submit(Reactor& self, std::uint64_t tag, int op, int file, std::int64_t offset, int buffer,
            std::int64_t buffer_offset, std::int64_t num_bytes, std::shared_ptr<Region> checksums,
            std::int64_t checksums_offset, bool verify) {
  self.submit({.tag = tag,
               .op = as_op(op),
               .file = file,
               .buffer = buffer,
               .offset = as_unsigned(offset, "offset"),
               .buffer_offset = as_unsigned(buffer_offset, "buffer_offset"),
               .num_bytes = as_unsigned(num_bytes, "num_bytes"),
               .checksums = std::move(checksums),
               .checksums_offset = as_unsigned(checksums_offset, "checksums_offset"),
               .verify = verify});
}

nb::list reap(Reactor& self, std::int64_t completions_max) {
  nb::list tuples;
  for (const Completion& c : self.reap(as_unsigned(completions_max, "completions_max"))) {
    tuples.append(nb::make_tuple(c.tag, static_cast<std::uint32_t>(c.status), c.error_number,
                                 c.offset, c.expected, c.actual));
  }
  return tuples;
}

void submit_blocks(BenchReactor& self, std::uint64_t tag, int file, const Bytes& writes,
                   const Words& offsets, int buffer, const std::optional<Words>& buffer_offsets,
                   std::int64_t num_bytes, const std::optional<Headers>& headers) {
  const std::size_t num_blocks = offsets.size();
  require(num_blocks > 0, "no blocks");
  require(writes.size() == num_blocks && (!buffer_offsets || buffer_offsets->size() == num_blocks),
          "writes, offsets and buffer_offsets are not of one length");
  Request request{
      .tag = tag, .file = file, .buffer = buffer, .num_bytes = as_unsigned(num_bytes, "num_bytes")};
  BenchBlocks& blocks = request.blocks.emplace();
  blocks.in_cells = !buffer_offsets;
  blocks.places.reserve(num_blocks);
  for (std::size_t i = 0; i < num_blocks; ++i) {
    require(writes.data()[i] <= 1, "writes holds more than 0 and 1");
    blocks.places.push_back({writes.data()[i] == 1 ? IoOp::kWrite : IoOp::kRead, offsets.data()[i],
                             buffer_offsets ? buffer_offsets->data()[i] : 0});
  }
  if (headers) {
    require(headers->shape(0) == num_blocks, "headers are not one for each block");
    const auto bytes = std::as_bytes(std::span(headers->data(), headers->size()));
    blocks.headers.assign(bytes.begin(), bytes.end());
  }
  self.submit(std::move(request));
}

nb::dict histogram(const Histogram& histogram) {
  auto counts = std::make_unique<std::uint64_t[]>(Histogram::kNumBuckets);
  std::ranges::copy(histogram.counts, counts.get());
  const nb::capsule owner(counts.get(),
                          [](void* p) noexcept { delete[] static_cast<std::uint64_t*>(p); });
  const std::size_t shape[] = {Histogram::kNumBuckets};
  nb::dict fields;
  fields["counts"] =
      nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>(counts.release(), 1, shape, owner);
  fields["num"] = histogram.num;
  fields["sum_ns"] = histogram.sum_ns;
  fields["min_ns"] = histogram.num == 0 ? 0 : histogram.min_ns;
  fields["max_ns"] = histogram.max_ns;
  return fields;
}

nb::dict clat(const BenchReactor& self) { return histogram(self.clat()); }

nb::dict latencies(const BenchReactor& self) {
  const auto latencies = std::make_unique<const Latencies>(self.latencies());
  const auto stages = [](const StageLatencies& of) {
    nb::dict fields;
    fields["slat"] = histogram(of.slat);
    fields["clat"] = histogram(of.clat);
    fields["lat"] = histogram(of.lat);
    return fields;
  };
  nb::dict directions;
  directions["read"] = stages(latencies->read);
  directions["write"] = stages(latencies->write);
  return directions;
}

nb::dict stats(const Reactor& self) {
  const ReactorStats stats = self.stats();
  nb::dict fields;
  fields["bytes_read"] = stats.bytes_read;
  fields["bytes_written"] = stats.bytes_written;
  fields["num_reads"] = stats.num_reads;
  fields["num_writes"] = stats.num_writes;
  fields["num_short"] = stats.num_short;
  fields["num_in_flight"] = stats.num_in_flight;
  return fields;
}

void bind_reactor(nb::module_& module) {
  nb::class_<Reactor> reactor(module, "Reactor");
  reactor.attr("READ") = static_cast<int>(IoOp::kRead);
  reactor.attr("WRITE") = static_cast<int>(IoOp::kWrite);
  reactor
      .def(nb::new_(&make_reactor<Reactor>), "engine"_a, "queue_depth"_a, "block_bytes"_a,
           nb::kw_only(), "faults"_a = nb::tuple())
      .def_prop_ro("event_fd", &Reactor::event_fd)
      .def_prop_ro("engine", &Reactor::engine_name)
      .def("add_file", &Reactor::add_file, "fd"_a, ReleaseGil())
      .def("remove_file", &Reactor::remove_file, "index"_a, ReleaseGil())
      .def("add_buffer", &Reactor::add_buffer, "region"_a, ReleaseGil())
      .def("remove_buffer", &Reactor::remove_buffer, "index"_a, ReleaseGil())
      .def("submit", &submit, "tag"_a, "op"_a, "file"_a, "offset"_a, "buffer"_a, "buffer_offset"_a,
           "num_bytes"_a, "checksums"_a = nb::none(), "checksums_offset"_a = 0, "verify"_a = false)
      .def("reap", &reap, "completions_max"_a)
      .def("stats", &stats)
      .def(
          "close",
          [](Reactor& self, int timeout_ms) {
            require(timeout_ms >= 0, "every wait has a deadline: timeout_ms is negative");
            return self.close(std::chrono::milliseconds(timeout_ms));
          },
          "timeout_ms"_a = 10'000, ReleaseGil());
  nb::class_<BenchReactor, Reactor>(module, "BenchReactor", nb::is_final())
      .def(nb::new_(&make_reactor<BenchReactor>), "engine"_a, "queue_depth"_a, "block_bytes"_a,
           nb::kw_only(), "faults"_a = nb::tuple())
      .def("submit_blocks", &submit_blocks, "tag"_a, "file"_a, "writes"_a.noconvert(),
           "offsets"_a.noconvert(), "buffer"_a, "buffer_offsets"_a.noconvert().none(),
           "num_bytes"_a, "headers"_a.noconvert() = nb::none())
      .def("latencies", &latencies)
      .def("clat", &clat)
      .def("reset_latencies", &BenchReactor::reset_latencies);
}

template <typename Value>
void bind_add_squares(nb::module_& module) {
  module.def(
      "add_squares",
      [](const Column<const Value>& values, const Column<float>& state, std::size_t first,
         std::size_t count) {
        const auto value = as_span(values, values.size());
        const auto sums = as_span(state, kSquareState);
        if (first > count || value.size() > count - first)
          throw std::invalid_argument("a column has no more numbers than its count");
        const nb::gil_scoped_release release;
        add_squares(value, sums, first, count);
      },
      "values"_a.noconvert(), "state"_a.noconvert(), "first"_a, "count"_a);
}

}  // namespace
}  // namespace infinity

NB_MODULE(_native, module) {
  // objects in variables of modules live until the interpreter is gone: no leak, and no news for
  // whoever runs a script
  nb::set_leak_warnings(false);
  using namespace infinity;
  nb::register_exception_translator(translate_errno);
  module.attr("ENGINES") = nb::tuple(nb::cast(engine_names()));
  module.attr("WIRE_LAYOUT") = wire_layout();
  module.attr("WIRE_CONSTANTS") = wire_constants();
  module.attr("POSIX_THREADS_MAX") = kPosixThreadsMax;
  module.attr("NUM_LATENCY_BUCKETS") = Histogram::kNumBuckets;
  module.def("latency_bucket", &Histogram::bucket, "ns"_a);
  module.def("probe_engine", &probe_engine, "engine"_a, ReleaseGil());
  module.def(
      "allocate",
      [](int fd, std::int64_t offset, std::int64_t num_bytes) {
        allocate(fd, as_unsigned(offset, "offset"), as_unsigned(num_bytes, "num_bytes"));
      },
      "fd"_a, "offset"_a, "num_bytes"_a, ReleaseGil());
  module.def(
      "checksum",
      [](const Bytes& buffer) {
        const auto bytes = as_span(buffer);
        const nb::gil_scoped_release release;
        return crc32c(bytes);
      },
      "buffer"_a.noconvert());
  module.def(
      "checksum_portable",
      [](const Bytes& buffer) {
        const auto bytes = as_span(buffer);
        const nb::gil_scoped_release release;
        return crc32c_portable(bytes);
      },
      "buffer"_a.noconvert());
  module.def(
      "join_halves",
      [](const Column<const std::int16_t>& numbers, const Column<const std::int16_t>& rests,
         const Column<std::int32_t>& markers, const Column<std::int32_t>& values) {
        const std::size_t count = values.size();
        const auto number = as_span(numbers, count), rest = as_span(rests, count);
        const auto marker = as_span(markers, count), value = as_span(values, count);
        const nb::gil_scoped_release release;
        return join_halves(number, rest, marker, value);
      },
      "numbers"_a.noconvert(), "rests"_a.noconvert(), "markers"_a.noconvert(),
      "values"_a.noconvert());
  module.def(
      "cut_halves",
      [](const Column<const std::int32_t>& values, const Column<std::int16_t>& numbers,
         const Column<std::int16_t>& rests, const Column<std::int32_t>& markers) {
        const std::size_t count = values.size();
        const auto value = as_span(values, count);
        const auto number = as_span(numbers, count), rest = as_span(rests, count);
        const auto marker = as_span(markers, count);
        const nb::gil_scoped_release release;
        return cut_halves(value, number, rest, marker);
      },
      "values"_a.noconvert(), "numbers"_a.noconvert(), "rests"_a.noconvert(),
      "markers"_a.noconvert());
  module.def(
      "round_by_chance",
      [](const Column<std::int32_t>& values, unsigned dropped, std::uint32_t seed,
         std::uint64_t first) {
        if (dropped == 0 || dropped > 23) throw std::invalid_argument("a mantissa has 23 bits");
        const auto value = as_span(values, values.size());
        const nb::gil_scoped_release release;
        round_by_chance(value, dropped, seed, first);
      },
      "values"_a.noconvert(), "dropped"_a, "seed"_a, "first"_a);
  module.def(
      "narrow_blocks",
      [](const Column<const std::int32_t>& values, const Column<std::uint8_t>& stored,
         bool is_signed) {
        const auto value = as_span(values, values.size());
        const auto bytes = as_span(stored, narrow_bytes(values.size()));
        const nb::gil_scoped_release release;
        return narrow_blocks(value, bytes, is_signed);
      },
      "values"_a.noconvert(), "stored"_a.noconvert(), "is_signed"_a);
  module.def(
      "widen_blocks",
      [](const Column<const std::uint8_t>& stored, const Column<std::int32_t>& values,
         bool is_signed) {
        const auto value = as_span(values, values.size());
        const auto bytes = as_span(stored, narrow_bytes(values.size()));
        const nb::gil_scoped_release release;
        widen_blocks(bytes, value, is_signed);
      },
      "stored"_a.noconvert(), "values"_a.noconvert(), "is_signed"_a);
  module.def(
      "norms_of_squares",
      [](const Column<const float>& states, const Column<const std::int64_t>& counts,
         const Column<float>& norms) {
        const std::size_t columns = counts.size();
        norms_of_squares(as_span(states, columns * kSquareState), as_span(counts, columns),
                         as_span(norms, columns));
      },
      "states"_a.noconvert(), "counts"_a.noconvert(), "norms"_a.noconvert());
  bind_add_squares<float>(module);
  bind_add_squares<std::int16_t>(module);
  bind_region(module);
  bind_rings(module);
  bind_reactor(module);
}
