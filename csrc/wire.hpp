// The shared-memory contract between ranks and the I/O daemon: ring entries, ring header,
// residency table, arena header, swap-file header.  Every struct is plain data with a fixed
// layout; io_daemon/shared/wire.py makes its codecs from wire_layout.hpp, and a test holds the
// constants of io_daemon/shared/protocol.py against these. Changing anything here means raising
// kProtocolVersion.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::wire {

inline constexpr std::uint32_t kProtocolVersion = 4;
inline constexpr std::uint64_t kRingMagic = 0x31474e5249464e49;   // "INFIRNG1", little endian
inline constexpr std::uint64_t kTableMagic = 0x314c425449464e49;  // "INFITBL1"
inline constexpr std::uint64_t kArenaMagic = 0x314e524149464e49;  // "INFIARN1"
inline constexpr std::uint64_t kSwapMagic = 0x3150575349464e49;   // "INFISWP1"

inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kPage = 4096;   // alignment of frames, extents and every direct I/O
inline constexpr std::size_t kKindsMax = 8;  // object kinds of one chunk
inline constexpr std::size_t kFramesPerObjectMax = 4;  // an fp32 object over bf16 frames needs 2
inline constexpr std::uint32_t kNoFrame = 0xffffffff;
inline constexpr std::uint64_t kNoExtent = ~std::uint64_t{0};

// Rank -> daemon.
struct Sqe {
  std::uint64_t seq;         // strictly increasing per tenant; names the lease an ACQUIRE asks for
  std::uint8_t opcode;       // protocol.Opcode
  std::uint8_t flags;        // reserved, must be 0
  std::uint8_t read_mask;    // ACQUIRE: kinds whose contents are needed
  std::uint8_t write_mask;   // ACQUIRE: kinds that will be written
  std::uint32_t chunk;       // chunk id
  std::uint64_t arg;         // RELEASE: seq of the lease; MARK: trace id
  std::uint8_t dirty_mask;   // RELEASE: kinds that have new contents
  std::uint8_t dead_mask;    // RELEASE: kinds whose contents nobody needs again
  std::uint8_t reserved[6];  // must be 0
};

// Daemon -> rank.
struct Cqe {
  std::uint64_t seq;          // of the SQE it answers
  std::uint32_t status;       // protocol.Status
  std::int32_t error_number;  // errno of the failed I/O, 0 otherwise
  std::uint32_t chunk;
  std::uint16_t file;      // index of the swap file, for the path in the error
  std::uint8_t kind;       // object kind of the failed I/O
  std::uint8_t born_mask;  // kinds that have never been written: the rank zero-fills them
  std::uint64_t offset;    // of the failed I/O in the swap file
  std::uint64_t expected;  // bytes asked for, or the expected checksum
  std::uint64_t actual;    // bytes transferred, or the checksum found
  std::uint64_t reserved[2];
};

// Each index has a cache line of its own.  Producer owns tail, consumer owns head; both only grow.
struct RingHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t num_entries;  // a power of two
  std::uint32_t entry_bytes;
  std::uint8_t pad0[kCacheLine - 20];
  alignas(kCacheLine) std::uint64_t tail;
  std::uint8_t pad1[kCacheLine - 8];
  alignas(kCacheLine) std::uint64_t head;
  std::uint8_t pad2[kCacheLine - 8];
  alignas(kCacheLine) std::uint32_t consumer_sleeps;
  std::uint8_t pad3[kCacheLine - 4];
};

// One object: one kind of one chunk.  Object id = chunk * kKindsMax + kind.
struct ObjectRecord {
  std::uint32_t frames[kFramesPerObjectMax];  // kNoFrame where unused; order is byte order
  std::uint64_t committed_offset;  // extent that holds the last complete version, kNoExtent: none
  std::uint64_t pending_offset;    // extent being written, kNoExtent: none
  std::uint64_t object_bytes;      // padded to kPage; 0: the chunk has no such kind
  std::uint64_t lease_seq;         // newest lease granted on it
  std::uint32_t checksum_index;    // first of its block checksums
  std::uint32_t version;           // grows with every completed write to disk
  std::uint16_t file;              // swap file index
  std::uint8_t state;              // states.ObjectState
  std::uint8_t flags;              // states.ObjectFlags
  std::uint16_t num_readers;
  std::uint8_t num_writers;
  std::uint8_t num_frames;
};

struct FrameRecord {
  std::uint64_t object_id;  // ~0: free
  std::uint32_t piece;      // which piece of the object
  std::uint32_t state;      // states.FrameState
};

// Table memfd: TableHeader | objects[chunks_max * kKindsMax] | frames[num_frames] | checksums[..]
struct TableHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t num_frames;
  std::uint64_t frame_bytes;
  std::uint64_t block_bytes;  // I/O block and checksum granularity
  std::uint32_t chunks_max;
  std::uint32_t num_chunks;
  std::uint64_t checksums_max;
  std::uint64_t objects_offset;
  std::uint64_t frames_offset;
  std::uint64_t checksums_offset;
  std::uint64_t generation;  // grows each time a daemon adopts the table
  std::uint8_t job[64];      // NUL-terminated UTF-8
  std::uint32_t rank;
  std::uint8_t pad[4096 - 148];
};

// First page of an arena memfd; frame f starts at kPage + f * frame_bytes.
struct ArenaHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t num_frames;
  std::uint64_t frame_bytes;
  std::uint32_t page_bytes;   // 4096, or the huge page size in use
  std::uint32_t page_locked;  // 1: mlocked by the rank
  std::uint8_t pad[4096 - 32];
};

// First page of a swap file; extents start at kPage.
struct SwapHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t rank;
  std::uint64_t file_bytes;
  std::uint64_t frame_bytes;
  std::uint64_t created_ns;       // wall clock, for people
  std::uint64_t owner_starttime;  // /proc/<pid>/stat field 22 of the daemon, against pid reuse
  std::uint32_t owner_pid;
  std::uint32_t file_index;
  std::uint8_t boot_id[40];       // NUL-terminated
  std::uint8_t job[64];           // NUL-terminated UTF-8
  std::uint32_t header_checksum;  // of this page with the field itself zero
  std::uint8_t machine[64];       // which machine the daemon runs on; empty in files of old
  std::uint8_t pad[4096 - 228];
};

static_assert(sizeof(Sqe) == 32 && alignof(Sqe) == 8);
static_assert(sizeof(Cqe) == 64 && alignof(Cqe) == 8);
static_assert(sizeof(RingHeader) == 4 * kCacheLine);
static_assert(offsetof(RingHeader, tail) == 64 && offsetof(RingHeader, head) == 128);
static_assert(offsetof(RingHeader, consumer_sleeps) == 192);
static_assert(sizeof(ObjectRecord) == 64);
static_assert(sizeof(FrameRecord) == 16);
static_assert(sizeof(TableHeader) == kPage);
static_assert(sizeof(ArenaHeader) == kPage);
static_assert(sizeof(SwapHeader) == kPage);

}  // namespace infinity::wire
