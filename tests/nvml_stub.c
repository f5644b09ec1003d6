/* A stand-in for NVIDIA's management library: `gpus` holds what its calls return. */
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, GPU_IS_LOST = 15 };

/* A reading of -1 is not supported; every call on a lost GPU fails. */
struct gpu {
    char bus_id[96], name[96], uuid[96];
    int lost, mig;
    long long total, used, utilization, power_mw;
    long long energy_mj, energy_step_mj; /* The counter rises by the step after each reading. */
};
struct gpu gpus[8];
int gpu_count, init_error, users, calls;

static int answer(struct gpu *gpu, long long value) {
    if (!users) return UNINITIALIZED;
    if (gpu->lost) return GPU_IS_LOST;
    return value == -1 ? NOT_SUPPORTED : OK;
}

int nvmlInitWithFlags(unsigned flags) { return init_error ? init_error : (users++, OK); }

int nvmlShutdown(void) { return users ? (users--, OK) : UNINITIALIZED; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    strncpy(text, "580.65.06", size);
    return users ? OK : UNINITIALIZED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = gpu_count;
    return users ? OK : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu) {
    if ((int)index >= gpu_count) return INVALID;
    *gpu = &gpus[index];
    return answer(*gpu, 0);
}

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, char *info) {
    strcpy(info + 16 + 5 * sizeof(unsigned), gpu->bus_id);
    return answer(gpu, 0);
}

int nvmlDeviceGetName(struct gpu *gpu, char *text, unsigned size) {
    strncpy(text, gpu->name, size);
    return answer(gpu, 0);
}

int nvmlDeviceGetUUID(struct gpu *gpu, char *text, unsigned size) {
    strncpy(text, gpu->uuid, size);
    return answer(gpu, *gpu->uuid ? 0 : -1);
}

int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending) {
    *current = *pending = gpu->mig;
    return answer(gpu, gpu->mig);
}

int nvmlDeviceGetMemoryInfo(struct gpu *gpu, unsigned long long *total_free_used) {
    total_free_used[0] = gpu->total;
    total_free_used[1] = gpu->total - gpu->used;
    total_free_used[2] = gpu->used;
    return answer(gpu, gpu->total);
}

int nvmlDeviceGetUtilizationRates(struct gpu *gpu, unsigned *gpu_memory) {
    gpu_memory[0] = gpu->utilization, gpu_memory[1] = 0;
    return answer(gpu, gpu->utilization);
}

int nvmlDeviceGetPowerUsage(struct gpu *gpu, unsigned *power_mw) {
    *power_mw = gpu->power_mw, calls++;
    return answer(gpu, gpu->power_mw);
}

int nvmlDeviceGetTotalEnergyConsumption(struct gpu *gpu, unsigned long long *energy_mj) {
    int error = answer(gpu, gpu->energy_mj);
    *energy_mj = gpu->energy_mj;
    if (!error) gpu->energy_mj += gpu->energy_step_mj;
    return error;
}
