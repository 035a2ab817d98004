// The layout of the wire structs as data, from which io_daemon/shared/wire.py makes its codecs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "wire.hpp"

namespace infinity::wire {

struct FieldLayout {
  std::string_view name;
  std::size_t offset;
  std::size_t bytes;
  std::size_t item_bytes;  // as bytes, unless it is an array
};

struct StructLayout {
  std::string_view name;
  std::size_t bytes;
  std::size_t alignment;
  std::span<const FieldLayout> fields;
};

struct Constant {
  std::string_view name;  // as in io_daemon/shared/protocol.py, where it is there
  std::uint64_t value;
};

#define INFINITY_FIELD(Struct, field)                              \
  FieldLayout {                                                    \
    #field, offsetof(Struct, field), sizeof(Struct::field),        \
        sizeof(std::remove_all_extents_t<decltype(Struct::field)>) \
  }
#define INFINITY_STRUCT(Struct, fields) \
  StructLayout { #Struct, sizeof(Struct), alignof(Struct), fields }

inline constexpr std::array kSqeFields{
    INFINITY_FIELD(Sqe, seq),       INFINITY_FIELD(Sqe, opcode),     INFINITY_FIELD(Sqe, flags),
    INFINITY_FIELD(Sqe, read_mask), INFINITY_FIELD(Sqe, write_mask), INFINITY_FIELD(Sqe, chunk),
    INFINITY_FIELD(Sqe, arg),       INFINITY_FIELD(Sqe, dirty_mask), INFINITY_FIELD(Sqe, dead_mask),
    INFINITY_FIELD(Sqe, reserved)};

inline constexpr std::array kCqeFields{
    INFINITY_FIELD(Cqe, seq),       INFINITY_FIELD(Cqe, status),  INFINITY_FIELD(Cqe, error_number),
    INFINITY_FIELD(Cqe, chunk),     INFINITY_FIELD(Cqe, file),    INFINITY_FIELD(Cqe, kind),
    INFINITY_FIELD(Cqe, born_mask), INFINITY_FIELD(Cqe, offset),  INFINITY_FIELD(Cqe, expected),
    INFINITY_FIELD(Cqe, actual),    INFINITY_FIELD(Cqe, reserved)};

inline constexpr std::array kRingHeaderFields{
    INFINITY_FIELD(RingHeader, magic),          INFINITY_FIELD(RingHeader, version),
    INFINITY_FIELD(RingHeader, num_entries),    INFINITY_FIELD(RingHeader, entry_bytes),
    INFINITY_FIELD(RingHeader, tail),           INFINITY_FIELD(RingHeader, head),
    INFINITY_FIELD(RingHeader, consumer_sleeps)};

inline constexpr std::array kObjectRecordFields{
    INFINITY_FIELD(ObjectRecord, frames),         INFINITY_FIELD(ObjectRecord, committed_offset),
    INFINITY_FIELD(ObjectRecord, pending_offset), INFINITY_FIELD(ObjectRecord, object_bytes),
    INFINITY_FIELD(ObjectRecord, lease_seq),      INFINITY_FIELD(ObjectRecord, checksum_index),
    INFINITY_FIELD(ObjectRecord, version),        INFINITY_FIELD(ObjectRecord, file),
    INFINITY_FIELD(ObjectRecord, state),          INFINITY_FIELD(ObjectRecord, flags),
    INFINITY_FIELD(ObjectRecord, num_readers),    INFINITY_FIELD(ObjectRecord, num_writers),
    INFINITY_FIELD(ObjectRecord, num_frames)};

inline constexpr std::array kFrameRecordFields{INFINITY_FIELD(FrameRecord, object_id),
                                               INFINITY_FIELD(FrameRecord, piece),
                                               INFINITY_FIELD(FrameRecord, state)};

inline constexpr std::array kTableHeaderFields{INFINITY_FIELD(TableHeader, magic),
                                               INFINITY_FIELD(TableHeader, version),
                                               INFINITY_FIELD(TableHeader, num_frames),
                                               INFINITY_FIELD(TableHeader, frame_bytes),
                                               INFINITY_FIELD(TableHeader, block_bytes),
                                               INFINITY_FIELD(TableHeader, chunks_max),
                                               INFINITY_FIELD(TableHeader, num_chunks),
                                               INFINITY_FIELD(TableHeader, checksums_max),
                                               INFINITY_FIELD(TableHeader, objects_offset),
                                               INFINITY_FIELD(TableHeader, frames_offset),
                                               INFINITY_FIELD(TableHeader, checksums_offset),
                                               INFINITY_FIELD(TableHeader, generation),
                                               INFINITY_FIELD(TableHeader, job),
                                               INFINITY_FIELD(TableHeader, rank)};

inline constexpr std::array kArenaHeaderFields{
    INFINITY_FIELD(ArenaHeader, magic),      INFINITY_FIELD(ArenaHeader, version),
    INFINITY_FIELD(ArenaHeader, num_frames), INFINITY_FIELD(ArenaHeader, frame_bytes),
    INFINITY_FIELD(ArenaHeader, page_bytes), INFINITY_FIELD(ArenaHeader, page_locked)};

inline constexpr std::array kSwapHeaderFields{INFINITY_FIELD(SwapHeader, magic),
                                              INFINITY_FIELD(SwapHeader, version),
                                              INFINITY_FIELD(SwapHeader, rank),
                                              INFINITY_FIELD(SwapHeader, file_bytes),
                                              INFINITY_FIELD(SwapHeader, frame_bytes),
                                              INFINITY_FIELD(SwapHeader, created_ns),
                                              INFINITY_FIELD(SwapHeader, owner_starttime),
                                              INFINITY_FIELD(SwapHeader, owner_pid),
                                              INFINITY_FIELD(SwapHeader, file_index),
                                              INFINITY_FIELD(SwapHeader, boot_id),
                                              INFINITY_FIELD(SwapHeader, job),
                                              INFINITY_FIELD(SwapHeader, header_checksum),
                                              INFINITY_FIELD(SwapHeader, machine)};

// Padding is not listed: nobody reads it.
inline constexpr std::array kStructs{INFINITY_STRUCT(Sqe, kSqeFields),
                                     INFINITY_STRUCT(Cqe, kCqeFields),
                                     INFINITY_STRUCT(RingHeader, kRingHeaderFields),
                                     INFINITY_STRUCT(ObjectRecord, kObjectRecordFields),
                                     INFINITY_STRUCT(FrameRecord, kFrameRecordFields),
                                     INFINITY_STRUCT(TableHeader, kTableHeaderFields),
                                     INFINITY_STRUCT(ArenaHeader, kArenaHeaderFields),
                                     INFINITY_STRUCT(SwapHeader, kSwapHeaderFields)};

inline constexpr std::array kConstants{Constant{"PROTOCOL_VERSION", kProtocolVersion},
                                       Constant{"RING_MAGIC", kRingMagic},
                                       Constant{"TABLE_MAGIC", kTableMagic},
                                       Constant{"ARENA_MAGIC", kArenaMagic},
                                       Constant{"SWAP_MAGIC", kSwapMagic},
                                       Constant{"CACHE_LINE_BYTES", kCacheLine},
                                       Constant{"PAGE_BYTES", kPage},
                                       Constant{"KINDS_MAX", kKindsMax},
                                       Constant{"FRAMES_PER_OBJECT_MAX", kFramesPerObjectMax},
                                       Constant{"NO_FRAME", kNoFrame},
                                       Constant{"NO_EXTENT", kNoExtent}};

#undef INFINITY_FIELD
#undef INFINITY_STRUCT

}  // namespace infinity::wire
