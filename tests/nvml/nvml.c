/*
 * A libnvidia-ml.so.1 that answers from a file of facts (hack/harness/nvmlstub.py writes it and builds this).
 *
 * NVML_STUB_FACTS names the file. Its lines, fields separated by one blank:
 *
 *   driver VERSION
 *   gpu ADDRESS UUID MEMORY_BYTES CAPABILITY_MAJOR.MINOR ARCHITECTURE PRODUCT…
 *   mig ADDRESS UUID GPU_INSTANCE COMPUTE_INSTANCE MEMORY_BYTES PROFILE
 *   link ADDRESS PEER_ADDRESS|-           one NVLink; "-": it is down
 *   fail FUNCTION CODE [ADDRESS]          the function returns CODE (for that GPU)
 *   hang FUNCTION [ADDRESS]
 *   crash FUNCTION [ADDRESS]
 *   xid ADDRESS NUMBER                    an event of that GPU, once for each line; the file is read again while it is
 *                                         waited for events, so that lines may be added, and rules come and go
 *
 * -DOLD_DRIVER leaves out what drivers did not have before MIG. Signatures and structures are those of
 * NVIDIA's documented interface; the numbers are its return values.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, NO_DRIVER = 9 };
enum { MOST_GPUS = 64, MOST_PARTS = 16, MOST_LINKS = 36, MOST_RULES = 32 };

struct mig { char uuid[96], name[96]; unsigned gpu_instance, compute_instance; unsigned long long memory; };
struct gpu {
    char address[32], uuid[96], product[48];
    unsigned long long memory;
    int major, minor;
    unsigned architecture;
    struct mig migs[MOST_PARTS];
    unsigned mig_count;
    char links[MOST_LINKS][32];
    unsigned link_count;
};
struct rule { char kind[8], function[64], address[32]; int code; };

static struct gpu gpus[MOST_GPUS];
static unsigned gpu_count, rule_count;
static struct rule rules[MOST_RULES];
static char driver[80];
static int ready;
struct event { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };
static struct event events[MOST_RULES];
static unsigned event_count;

static struct gpu *find(const char *address) {
    unsigned d1, b1, s1, f1, d2, b2, s2, f2;
    if (sscanf(address, "%x:%x:%x.%x", &d1, &b1, &s1, &f1) != 4) return NULL;
    for (unsigned i = 0; i < gpu_count; i++)
        if (sscanf(gpus[i].address, "%x:%x:%x.%x", &d2, &b2, &s2, &f2) == 4 && d1 == d2 && b1 == b2 && s1 == s2 && f1 == f2)
            return &gpus[i];
    return NULL;
}

static void read_line(char *line) {
    char address[32], peer[32];
    struct gpu *gpu;
    struct rule rule = {.code = 999};
    struct mig mig = {0};
    if (sscanf(line, "driver %79s", driver) == 1) return;
    if (!strncmp(line, "gpu ", 4) && gpu_count < MOST_GPUS) {
        gpu = &gpus[gpu_count];
        if (sscanf(line, "gpu %31s %95s %llu %d.%d %u %47[^\n]", gpu->address, gpu->uuid, &gpu->memory, &gpu->major,
                   &gpu->minor, &gpu->architecture, gpu->product) == 7)
            gpu_count++;
        return;
    }
    char profile[32];
    if (sscanf(line, "mig %31s %95s %u %u %llu %31s", address, mig.uuid, &mig.gpu_instance, &mig.compute_instance,
               &mig.memory, profile) == 6) {
        gpu = find(address);
        if (gpu && gpu->mig_count < MOST_PARTS) {
            snprintf(mig.name, sizeof mig.name, "%s MIG %s", gpu->product, profile);
            gpu->migs[gpu->mig_count++] = mig;
        }
        return;
    }
    if (sscanf(line, "link %31s %31s", address, peer) == 2) {
        gpu = find(address);
        if (gpu && gpu->link_count < MOST_LINKS) strcpy(gpu->links[gpu->link_count++], peer);
        return;
    }
    unsigned xid;
    if (sscanf(line, "xid %31s %u", address, &xid) == 2) {
        gpu = find(address);
        if (gpu && event_count < MOST_RULES) events[event_count++] = (struct event){.device = gpu, .type = 8, .data = xid};
        return;
    }
    if (rule_count < MOST_RULES && (sscanf(line, "fail %63s %d %31s", rule.function, &rule.code, rule.address) >= 2)) {
        strcpy(rule.kind, "fail");
        rules[rule_count++] = rule;
    } else if (rule_count < MOST_RULES && sscanf(line, "%7s %63s %31s", rule.kind, rule.function, rule.address) >= 2) {
        rules[rule_count++] = rule;
    }
}

/* What the facts say this call shall do instead of answering; OK when nothing. */
static int ruled(const char *function, const struct gpu *gpu) {
    for (unsigned i = 0; i < rule_count; i++) {
        struct rule *rule = &rules[i];
        if (strcmp(rule->function, function) || (rule->address[0] && (!gpu || find(rule->address) != gpu))) continue;
        if (!strcmp(rule->kind, "hang")) for (;;) pause();
        if (!strcmp(rule->kind, "crash")) abort();
        return rule->code;
    }
    return ready || !strcmp(function, "nvmlInit_v2") ? OK : UNINITIALIZED;
}

#define RULED(gpu) do { int code = ruled(__func__, gpu); if (code != OK) return code; } while (0)

static int is_mig(const void *device) {
    for (unsigned i = 0; i < gpu_count; i++)
        if ((const char *)device >= (const char *)gpus[i].migs && (const char *)device < (const char *)(gpus[i].migs + MOST_PARTS))
            return 1;
    return 0;
}

static const struct gpu *owner(const void *device) {
    for (unsigned i = 0; i < gpu_count; i++)
        if ((const char *)device >= (const char *)&gpus[i] && (const char *)device < (const char *)&gpus[i + 1]) return &gpus[i];
    return NULL;
}

static int copy(char *out, unsigned size, const char *text) {
    if (strlen(text) >= size) return 7; /* insufficient size */
    strcpy(out, text);
    return OK;
}

static int read_facts(void) {
    const char *path = getenv("NVML_STUB_FACTS");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    if (!file) return NO_DRIVER;
    gpu_count = rule_count = event_count = 0;
    memset(gpus, 0, sizeof gpus);
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
    return OK;
}

int nvmlInit_v2(void) {
    if (read_facts() != OK) return NO_DRIVER;
    fputs("a library that writes to standard output", stdout); /* no line end: it would spoil the next line */
    fflush(stdout);
    RULED(NULL);
    ready = 1;
    return OK;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { RULED(NULL); ready = 0; return OK; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { RULED(NULL); return copy(out, size, driver); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    struct gpu *gpu = find(address);
    RULED(gpu);
    *device = gpu;
    return gpu ? OK : NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    RULED(owner(device));
    return copy(out, size, is_mig(device) ? ((struct mig *)device)->uuid : ((struct gpu *)device)->uuid);
}

int nvmlDeviceGetName(void *device, char *out, unsigned size) {
    RULED(owner(device));
    return copy(out, size, is_mig(device) ? ((struct mig *)device)->name : ((struct gpu *)device)->product);
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
    RULED(owner(device));
    memory[0] = is_mig(device) ? ((struct mig *)device)->memory : ((struct gpu *)device)->memory;
    memory[1] = memory[0] - (1 << 20);
    memory[2] = 1 << 20;
    return OK;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetArchitecture(struct gpu *gpu, unsigned *out) { RULED(gpu); *out = gpu->architecture; return OK; }

int nvmlDeviceGetCudaComputeCapability(struct gpu *gpu, int *major, int *minor) {
    RULED(gpu);
    *major = gpu->major;
    *minor = gpu->minor;
    return OK;
}

int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending) {
    RULED(gpu);
    *current = *pending = gpu->mig_count > 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, unsigned *count) { RULED(gpu); *count = 7; return OK; }

/* Slots need not be filled from the first one on: the stub leaves slot 0 empty. */
int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned index, void **device) {
    RULED(gpu);
    if (index == 0 || index > gpu->mig_count) return NOT_FOUND;
    *device = &gpu->migs[index - 1];
    return OK;
}

int nvmlDeviceGetGpuInstanceId(struct mig *mig, unsigned *id) { RULED(owner(mig)); *id = mig->gpu_instance; return OK; }
int nvmlDeviceGetComputeInstanceId(struct mig *mig, unsigned *id) { RULED(owner(mig)); *id = mig->compute_instance; return OK; }

int nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned link, unsigned *active) {
    RULED(gpu);
    if (!gpu->link_count) return NOT_SUPPORTED;
    if (link >= gpu->link_count) return INVALID;
    *active = gpu->links[link][0] != '-';
    return OK;
}

struct pci { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; };

int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct gpu *gpu, unsigned link, struct pci *out) {
    unsigned domain, bus, device, function;
    RULED(gpu);
    if (link >= gpu->link_count) return INVALID;
    if (sscanf(gpu->links[link], "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    out->domain = domain;
    out->bus = bus;
    out->device = device;
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.%X", domain, bus, device, function);
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.%X", domain & 0xffff, bus & 0xff, device & 0x1f, function & 7);
    return OK;
}
#endif

enum { TIMED_OUT = 10 };

int nvmlEventSetCreate(void **set) { RULED(NULL); *set = events; return OK; }
int nvmlEventSetFree(void *set) { (void)set; RULED(NULL); return OK; }
int nvmlDeviceRegisterEvents(struct gpu *gpu, unsigned long long types, void *set) {
    RULED(gpu);
    return types && set == events ? OK : INVALID;
}

#ifndef OLD_DRIVER
/* The facts are looked at 20 times a second. GPUs keep their places as long as their lines do. */
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned milliseconds) {
    static unsigned event_told;
    if (set != events) return INVALID;
    for (unsigned waited = 0;; waited += 50) {
        if (read_facts() != OK) return NO_DRIVER;
        RULED(NULL);
        if (event_told < event_count) {
            *event = events[event_told++];
            return OK;
        }
        if (waited >= milliseconds) return TIMED_OUT;
        usleep(50000);
    }
}
#endif
