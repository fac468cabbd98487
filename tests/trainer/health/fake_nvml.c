/* A GPU that does what a test says, behind NVML's own C interface: names, types and structures as in NVIDIA's nvml.h. */
#include <stdint.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
enum quantity { ENERGY, POWER, LIMIT, TEMPERATURE, MEMORY_TEMPERATURE, SM, MEMORY, MAX_SM, REASONS, ECC, QUANTITIES };

typedef struct {
    char uuid[96], bus[32], name[96];
    int64_t value[QUANTITIES];
    int32_t error[QUANTITIES]; /* what asking for it returns instead */
    int32_t slice_of;          /* index of the GPU that this is a slice of; -1: it is a GPU */
} gpu;

typedef gpu *nvmlDevice_t;
typedef struct {
    uint32_t fieldId, scopeId;
    int64_t timestamp, latencyUsec;
    uint32_t valueType, nvmlReturn;
    union { double d; uint32_t ui; uint64_t ull; int64_t sll; } value;
} nvmlFieldValue_t;

gpu fake_gpus[4];
int32_t fake_count, fake_init, fake_calls[QUANTITIES];

static int get(nvmlDevice_t device, enum quantity which, void *out, int bytes) {
    fake_calls[which]++;
    if (device->slice_of >= 0) return INVALID_ARGUMENT;
    if (device->error[which]) return device->error[which];
    memcpy(out, &device->value[which], bytes);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) { return fake_init; }
int nvmlInit_v2(void) { return fake_init; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int result) { return "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = fake_count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *out) {
    *out = &fake_gpus[i];
    return i < (unsigned)fake_count ? OK : INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
    for (int i = 0; i < 4; i++) /* slices have handles, but are not counted */
        if (*fake_gpus[i].uuid && !strcmp(fake_gpus[i].uuid, uuid)) return *out = &fake_gpus[i], OK;
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *out) {
    for (int i = 0; i < fake_count; i++)
        if (!strcmp(fake_gpus[i].bus, bus)) return *out = &fake_gpus[i], OK;
    return NOT_FOUND;
}
int nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *out) { *out = device->slice_of >= 0; return OK; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out) {
    if (device->slice_of < 0) return INVALID_ARGUMENT;
    *out = &fake_gpus[device->slice_of];
    return OK;
}
int nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned length) { strncpy(out, device->uuid, length); return OK; }
int nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned length) { strncpy(out, device->name, length); return OK; }
int nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, uint64_t *out) { return get(device, ENERGY, out, 8); }
int nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *out) { return get(device, POWER, out, 4); }
int nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *out) { return get(device, LIMIT, out, 4); }
int nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned *out) {
    return get(device, type == 1 ? SM : MEMORY, out, 4); /* NVML_CLOCK_SM 1, NVML_CLOCK_MEM 2 */
}
int nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int type, unsigned *out) {
    return type == 1 ? get(device, MAX_SM, out, 4) : NOT_SUPPORTED;
}
int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int error, int counter, uint64_t *out) {
    return error == 1 && counter == 0 ? get(device, ECC, out, 8) : INVALID_ARGUMENT; /* uncorrected, volatile */
}
int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    for (int i = 0; i < count; i++) {
        values[i].valueType = 1; /* unsigned int */
        values[i].nvmlReturn = NOT_SUPPORTED;
        if (values[i].fieldId != 82) continue; /* NVML_FI_DEV_MEMORY_TEMP */
        values[i].nvmlReturn = get(device, MEMORY_TEMPERATURE, &values[i].value.ui, 4);
    }
    return OK;
}
typedef struct { uint32_t version, sensor; int32_t temperature; } nvmlTemperature_t;
int nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *out) {
    if (out->version != (sizeof *out | 1 << 24)) return 25; /* argument version mismatch */
    return get(device, TEMPERATURE, &out->temperature, 4);
}
int nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, uint64_t *out) { return get(device, REASONS, out, 8); }
