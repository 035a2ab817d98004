/* Stands in for the CUDA driver's library in tests. Without STUB_CUDA_DEVICES it finds no GPU, as on a machine that has
 * the driver alone; with it there is one, whose memory is ordinary memory that only the driver's calls may name. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_POINTER = 3, ATTRIBUTE_DEVICE_ORDINAL = 9 };
enum { MEMORY_DEVICE = 2, ALLOCATIONS_MAX = 64 };

static int context_of_gpu;
static _Thread_local void *current;
static struct {
  CUdeviceptr address;
  size_t num_bytes;
} allocations[ALLOCATIONS_MAX];

static int num_devices(void) { return getenv("STUB_CUDA_DEVICES") != NULL; }
static CUresult only_with_gpu(void) { return num_devices() ? SUCCESS : NO_DEVICE; }

static int find(CUdeviceptr address) {
  for (int i = 0; i < ALLOCATIONS_MAX; ++i) {
    if (allocations[i].num_bytes > 0 && address - allocations[i].address < allocations[i].num_bytes) return i;
  }
  return -1;
}

CUresult cuInit(unsigned flags) { return flags == 0 ? only_with_gpu() : INVALID_VALUE; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = num_devices(), only_with_gpu(); }
CUresult cuDeviceGet(int *device, int ordinal) { return *device = ordinal, only_with_gpu(); }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)attribute, (void)device;
  return *value = 0, only_with_gpu();
}

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
  (void)device;
  return *context = &context_of_gpu, only_with_gpu();
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, SUCCESS; }
CUresult cuCtxSetCurrent(void *context) { return current = context, SUCCESS; }
CUresult cuCtxGetCurrent(void **context) { return *context = current, SUCCESS; }
CUresult cuCtxPushCurrent_v2(void *context) { return current = context, SUCCESS; }
CUresult cuCtxPopCurrent_v2(void **context) {
  if (context != NULL) *context = current;
  return current = NULL, SUCCESS;
}
CUresult cuCtxGetDevice(int *device) { return *device = 0, only_with_gpu(); }
CUresult cuCtxCreate_v2(void **context) { return *context = &context_of_gpu, only_with_gpu(); }
CUresult cuCtxCreate_v4(void **context) { return *context = &context_of_gpu, only_with_gpu(); }
CUresult cuCtxDestroy_v2(void *context) { return (void)context, SUCCESS; }

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t num_bytes) {
  if (current == NULL) return INVALID_VALUE;
  for (int i = 0; i < ALLOCATIONS_MAX; ++i) {
    if (allocations[i].num_bytes > 0) continue;
    allocations[i].address = *address = (CUdeviceptr)calloc(1, num_bytes);
    allocations[i].num_bytes = num_bytes;
    return *address == 0 ? OUT_OF_MEMORY : SUCCESS;
  }
  return OUT_OF_MEMORY;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
  const int i = find(address);
  if (i < 0 || allocations[i].address != address || current == NULL) return INVALID_VALUE;
  free((void *)allocations[i].address);
  return allocations[i].num_bytes = 0, SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *num_bytes, CUdeviceptr address) {
  const int i = find(address);
  if (i < 0) return INVALID_VALUE;
  if (base != NULL) *base = allocations[i].address;
  if (num_bytes != NULL) *num_bytes = allocations[i].num_bytes;
  return SUCCESS;
}
CUresult cuMemHostAlloc(void **address, size_t num_bytes, unsigned flags) {
  (void)flags;
  *address = aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096);
  return *address == NULL ? OUT_OF_MEMORY : only_with_gpu();
}
CUresult cuMemFreeHost(void *address) { return free(address), SUCCESS; }
CUresult cuMemHostRegister_v2(void *address, size_t num_bytes, unsigned flags) {
  return (void)address, (void)num_bytes, (void)flags, only_with_gpu();
}
CUresult cuMemHostUnregister(void *address) { return (void)address, SUCCESS; }

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t num_bytes) {
  if (find(to) < 0 || find(to + num_bytes - 1) < 0 || current == NULL) return INVALID_VALUE;
  return memcpy((void *)to, from, num_bytes), SUCCESS;
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t num_bytes) {
  if (find(from) < 0 || find(from + num_bytes - 1) < 0 || current == NULL) return INVALID_VALUE;
  return memcpy(to, (const void *)from, num_bytes), SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t num_bytes, void *stream) {
  return (void)stream, memcpy((void *)to, from, num_bytes), SUCCESS;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t num_bytes, void *stream) {
  return (void)stream, memcpy(to, (const void *)from, num_bytes), SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t num_bytes, void *stream) {
  return (void)stream, memcpy((void *)to, (const void *)from, num_bytes), SUCCESS;
}
static CUresult copy_batch(CUdeviceptr *to, CUdeviceptr *from, size_t *num_bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) memcpy((void *)to[i], (const void *)from[i], num_bytes[i]);
  return SUCCESS;
}
CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *num_bytes, size_t count) {
  return copy_batch(to, from, num_bytes, count);
}
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *num_bytes, size_t count) {
  return copy_batch(to, from, num_bytes, count);
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
  const int i = find(address);
  if (i < 0) return num_devices() ? INVALID_VALUE : NOT_INITIALIZED;
  switch (attribute) {
    case ATTRIBUTE_CONTEXT:
      return *(void **)value = &context_of_gpu, SUCCESS;
    case ATTRIBUTE_MEMORY_TYPE:
      return *(unsigned *)value = MEMORY_DEVICE, SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER:
      return *(CUdeviceptr *)value = address, SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL:
      return *(int *)value = 0, SUCCESS;
    default:
      return INVALID_VALUE;
  }
}
/* Unlike the single one it knows no error for memory that is not the driver's: what it has to say of that is 0. */
CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **values, CUdeviceptr address) {
  if (!num_devices()) return NOT_INITIALIZED;
  for (unsigned i = 0; i < count; ++i) {
    if (cuPointerGetAttribute(values[i], attributes[i], address) == SUCCESS) continue;
    const size_t num_bytes = attributes[i] == ATTRIBUTE_CONTEXT || attributes[i] == ATTRIBUTE_DEVICE_POINTER ? 8 : 4;
    memset(values[i], 0, num_bytes);
  }
  return SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = error == NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
          : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
                                   : "CUDA_ERROR_UNKNOWN";
  return SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

/* Everything is done when a call returns, so streams and events have nothing to wait for. */
CUresult cuStreamCreate(void **stream, unsigned flags) { return (void)flags, *stream = &context_of_gpu, SUCCESS; }
CUresult cuStreamDestroy_v2(void *stream) { return (void)stream, SUCCESS; }
CUresult cuStreamSynchronize(void *stream) { return (void)stream, SUCCESS; }
CUresult cuEventCreate(void **event, unsigned flags) { return (void)flags, *event = &context_of_gpu, SUCCESS; }
CUresult cuEventDestroy_v2(void *event) { return (void)event, SUCCESS; }
CUresult cuEventRecord(void *event, void *stream) { return (void)event, (void)stream, SUCCESS; }
CUresult cuEventQuery(void *event) { return (void)event, SUCCESS; }
CUresult cuEventSynchronize(void *event) { return (void)event, SUCCESS; }
CUresult cuLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
  return (void)stream, function(argument), SUCCESS;
}
