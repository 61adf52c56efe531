/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for the CUDA runtime: notes the calls that it gets. */
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>
#define ADDRESS(pointer) (uint64_t)(pointer)
uint64_t noted[256][6];
int num_noted = 0, result = 0, version = 13000, num_streams = 0;
volatile int held = 0; /* batches wait while this is set */
int device = 0, last_flags = -1, num_events = 0, pending = 0, num_synchronized = 0, num_destroyed = 0;
static int note(uint64_t call, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e)
{
    uint64_t values[6] = {call, a, b, c, d, e};
    for (int i = 0; i < 6; i++) noted[num_noted % 256][i] = values[i];
    num_noted++;
    return result;
}
int cudaEventRecord(void *event, void *stream) { return note(1, ADDRESS(event), ADDRESS(stream), 0, 0, 0); }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    return note(2, ADDRESS(stream), ADDRESS(event), flags, 0, 0);
}
int cudaEventQuery(void *event)
{
    int code = note(3, ADDRESS(event), 0, 0, 0, 0);
    return pending > 0 ? pending--, 600 : code;
}
int cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream)
{
    return note(4, ADDRESS(to), ADDRESS(from), nbytes, (uint64_t)kind, ADDRESS(stream));
}
int cudaGetLastError(void) { return note(5, 0, 0, 0, 0, 0); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags)
{
    *stream = (void *)(0x1000 * (uint64_t)++num_streams);
    return note(7, flags, 0, 0, 0, 0);
}
int cudaStreamSynchronize(void *stream) { return note(8, ADDRESS(stream), 0, 0, 0, 0); }
int cudaStreamDestroy(void *stream) { num_streams--; return note(9, ADDRESS(stream), 0, 0, 0, 0); }
int cudaEventCreateWithFlags(void **event, unsigned flags)
{
    *event = (void *)(0x100000 + 0x100 * (uint64_t)++num_events);
    last_flags = (int)flags;
    return 0;
}
int cudaEventSynchronize(void *event) { num_synchronized++; return 0; }
int cudaEventDestroy(void *event) { num_destroyed++; return 0; }
int cudaEventElapsedTime(float *milliseconds, void *first, void *last)
{
    *milliseconds = 1.5f;
    return note(10, ADDRESS(first), ADDRESS(last), 0, 0, 0);
}
int cudaHostGetDevicePointer(void **found, void *host, unsigned flags)
{
    *found = (char *)host + 64;
    return note(11, ADDRESS(host), flags, 0, 0, 0);
}
int cudaSetDevice(int chosen) { return note(13, (uint64_t)chosen, 0, 0, 0, 0); }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return note(14, (uint64_t)*mode, 0, 0, 0, 0); }
int cudaGetDevice(int *found) { *found = device; return result; }
int cudaRuntimeGetVersion(int *found) { *found = version; return 0; }
#ifndef WITHOUT_BATCH
int cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes, size_t count,
                         const int *attributes, const size_t *first, size_t num_attributes, void *stream)
{
    uint64_t hints = 0;
    while (held) usleep(100);
    for (size_t i = 0; i < count && i < 100; i++) note(12, ADDRESS(to[i]), ADDRESS(from[i]), sizes[i], 0, 0);
    for (int i = 1; i < 5; i++) hints |= attributes[i] != 0;
    return note(6, count, ADDRESS(stream), attributes[0] << 8 | attributes[5], hints, *first << 8 | num_attributes);
}
#endif
