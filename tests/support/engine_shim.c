/* Stands between the compiled core and liburing, libaio and libc (LD_PRELOAD), and shows or changes what
 * passes:
 *   SHIM_NO_EXT_ARG=1      liburing believes that the kernel has no IORING_FEAT_EXT_ARG (before Linux 5.11)
 *   SHIM_REFUSED=ERRNO:N   the first N submissions that begin with a poll are refused
 *   SHIM_BLIND=1           pread says that it has read everything, and has moved nothing
 *   SHIM_LOG=FILE          one line ("registered") for each write through io_uring whose file and buffer both are
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <libaio.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

static void show(const char *line) {
  const char *path = getenv("SHIM_LOG");
  if (path == NULL) return;
  int fd = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (fd < 0 || write(fd, line, strlen(line)) < 0) abort();
  close(fd);
}

int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags) {
  int (*real)(unsigned, struct io_uring *, unsigned) = next("io_uring_queue_init");
  int result = real(entries, ring, flags);
  if (result == 0 && getenv("SHIM_NO_EXT_ARG") != NULL) ring->features &= ~IORING_FEAT_EXT_ARG;
  return result;
}

/* Whether the first entry that waits is a poll, while some of those are to be refused: then -errno. */
static int refusal(const struct io_uring_sqe *first) {
  static long num_refused;
  const char *what = getenv("SHIM_REFUSED");
  if (what == NULL || first->opcode != IORING_OP_POLL_ADD) return 0;
  const char *count = strchr(what, ':');
  if (count == NULL || num_refused >= atol(count + 1)) return 0;
  ++num_refused;
  return -atoi(what);
}

int io_uring_submit(struct io_uring *ring) {
  int (*real)(struct io_uring *) = next("io_uring_submit");
  const struct io_uring_sq *sq = &ring->sq;
  for (unsigned i = sq->sqe_head; i != sq->sqe_tail; ++i) {
    const struct io_uring_sqe *sqe = &sq->sqes[i & *sq->kring_mask];
    const int refused = i == sq->sqe_head ? refusal(sqe) : 0;
    if (refused != 0) return refused;
    if (sqe->opcode == IORING_OP_WRITE_FIXED && sqe->flags & IOSQE_FIXED_FILE) show("registered\n");
  }
  return real(ring);
}

ssize_t pread(int fd, void *bytes, size_t num_bytes, off_t offset) {
  ssize_t (*real)(int, void *, size_t, off_t) = next("pread");
  return getenv("SHIM_BLIND") != NULL ? (ssize_t)num_bytes : real(fd, bytes, num_bytes, offset);
}
