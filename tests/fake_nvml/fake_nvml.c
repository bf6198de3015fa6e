/* A driver library for tests: the part of libnvidia-ml.so.1 that the node agent calls, fed from a text file.
 *
 * The file is named by FAKE_NVML and read again at every call, so a test changes the machine while programs look at
 * it. tests/fake_nvml_driver.py writes it; the format is one word and its values per line:
 *
 *   driver 570.86.10              global lines stand before the first device
 *   missing FUNCTION              an old driver does not have it
 *   error FUNCTION CODE           it fails so; inside a device: on that device only
 *   hang FUNCTION SECONDS         it does not answer for so long; likewise
 *   event NUMBER UUID TYPE DATA   delivered once to every event set older than it; UUID - names no device
 *   device UUID                   what follows is about it
 *   slice UUID                    a MIG slice of the device before it
 *   name TEXT / total MIB / reserved MIB / used MIB / utilisation % / temperature C / ecc N / recovery N / mig 0|1
 *   lost                          it has fallen off the bus
 *   process PID MIB               MIB -1: the driver does not say how much
 *   client PID MIB                of an MPS server
 *
 * Handles are interned UUIDs: a handle of a device that has gone answers that it is lost.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10,
       NO_FUNCTION = 13, LOST = 15 };
enum { DEVICES = 64, PROCESSES = 64, RULES = 64, EVENTS = 256, TEXT = 96 };

typedef unsigned long long u64;
typedef struct { char function[TEXT]; char uuid[TEXT]; int code; double hang_s; } Rule;
typedef struct { unsigned pid; int mps; long long used_mib; } Process;
typedef struct {
    char uuid[TEXT], name[TEXT];
    int parent; /* index of the whole device, -1 for one */
    int mig, lost, utilisation, temperature, processes;
    long long total, reserved, used, ecc, recovery;
    Process process[PROCESSES];
} Device;
typedef struct { u64 number, type, data; char uuid[TEXT]; } Event;
typedef struct { char driver[TEXT]; int rules, devices, events; Rule rule[RULES]; Device device[DEVICES]; Event event[EVENTS]; } Table;
typedef struct { u64 seen; } EventSet;

typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
typedef struct { unsigned gpu, memory; } Utilisation;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } ProcessInfo;
typedef struct { void *device; u64 type, data; unsigned gpu_instance, compute_instance; } EventData;
typedef struct { unsigned field, scope; long long stamp, latency; int type, result; union { u64 wide; unsigned narrow; } value; } FieldValue;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *interned[1024];
static int initialised;

static void *handle(const char *uuid) {
    void *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 1024 && !found; i++) {
        if (!interned[i]) interned[i] = strdup(uuid);
        if (!strcmp(interned[i], uuid)) found = interned[i];
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void nap(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left)) {}
}

static void parse(Table *t, char *line) {
    char word[TEXT] = "", a[TEXT] = "", b[TEXT] = "";
    int at = 0, got = sscanf(line, "%95s %n%95s %95s", word, &at, a, b);
    if (got < 1) return;
    Device *d = t->devices ? &t->device[t->devices - 1] : NULL;
    long long n = atoll(a);
    if (!strcmp(word, "driver")) strcpy(t->driver, a);
    else if (!strcmp(word, "missing") || !strcmp(word, "error") || !strcmp(word, "hang")) {
        if (t->rules == RULES) return;
        Rule *r = &t->rule[t->rules++];
        strcpy(r->function, a);
        if (d) strcpy(r->uuid, d->uuid);
        r->code = word[0] == 'm' ? NO_FUNCTION : word[0] == 'e' ? atoi(b) : OK;
        r->hang_s = word[0] == 'h' ? atof(b) : 0;
    } else if (!strcmp(word, "event")) {
        if (t->events == EVENTS) return;
        Event *e = &t->event[t->events++];
        if (sscanf(line, "%*s %llu %95s %llu %llu", &e->number, e->uuid, &e->type, &e->data) != 4) t->events--;
    } else if (!strcmp(word, "device") || !strcmp(word, "slice")) {
        if (t->devices == DEVICES) return;
        int parent = -1;
        if (word[0] == 's')
            for (parent = t->devices - 1; parent > 0 && t->device[parent].parent >= 0; parent--) {}
        d = &t->device[t->devices++];
        memset(d, 0, sizeof *d);
        strcpy(d->uuid, a);
        d->parent = parent;
    } else if (!d) return;
    else if (!strcmp(word, "name")) {
        snprintf(d->name, TEXT, "%.90s", line + at);
        d->name[strcspn(d->name, "\n")] = 0;
    } else if (!strcmp(word, "total")) d->total = n;
    else if (!strcmp(word, "reserved")) d->reserved = n;
    else if (!strcmp(word, "used")) d->used = n;
    else if (!strcmp(word, "utilisation")) d->utilisation = (int)n;
    else if (!strcmp(word, "temperature")) d->temperature = (int)n;
    else if (!strcmp(word, "ecc")) d->ecc = n;
    else if (!strcmp(word, "recovery")) d->recovery = n;
    else if (!strcmp(word, "mig")) d->mig = (int)n;
    else if (!strcmp(word, "lost")) d->lost = 1;
    else if ((!strcmp(word, "process") || !strcmp(word, "client")) && d->processes < PROCESSES) {
        d->process[d->processes].mps = word[0] == 'c';
        d->process[d->processes].pid = (unsigned)n;
        d->process[d->processes++].used_mib = atoll(b);
    }
}

static Table *table(void) {
    static __thread Table *t;
    if (!t) t = malloc(sizeof *t);
    memset(t, 0, sizeof *t);
    strcpy(t->driver, "570.86.10");
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    while (file && fgets(line, sizeof line, file)) parse(t, line);
    if (file) fclose(file);
    return t;
}

/* What the rules make of a call; the device they name comes out of `found`. */
static int begin(const char *function, void *which, Device **found, Table **all) {
    Table *t = table();
    Device *d = NULL;
    for (int i = 0; which && i < t->devices; i++)
        if (!strcmp(t->device[i].uuid, (char *)which)) d = &t->device[i];
    for (int i = 0; i < t->rules; i++) {
        Rule *r = &t->rule[i];
        if (strcmp(r->function, function) || (r->uuid[0] && (!d || strcmp(r->uuid, d->uuid)))) continue;
        if (r->hang_s > 0) nap(r->hang_s);
        if (r->code) return r->code;
    }
    if (strcmp(function, "nvmlInitWithFlags") && !initialised) return UNINITIALIZED;
    if (which && (!d || d->lost || (d->parent >= 0 && t->device[d->parent].lost))) return LOST;
    if (found) *found = d;
    if (all) *all = t;
    return OK;
}
#define BEGIN(which) Device *d = NULL; Table *t = NULL; int rc = begin(__func__, which, &d, &t); (void)d; (void)t; if (rc) return rc

int nvmlInitWithFlags(unsigned flags) { (void)flags; BEGIN(NULL); initialised++; return OK; }
int nvmlShutdown(void) { BEGIN(NULL); initialised--; return OK; }
const char *nvmlErrorString(int code) { static char text[32]; snprintf(text, sizeof text, "fake error %d", code); return text; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) { BEGIN(NULL); snprintf(out, size, "%s", t->driver); return OK; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN(NULL);
    *count = 0;
    for (int i = 0; i < t->devices; i++) *count += t->device[i].parent < 0;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    BEGIN(NULL);
    for (int i = 0; i < t->devices; i++)
        if (t->device[i].parent < 0 && index-- == 0) {
            *out = handle(t->device[i].uuid);
            return begin(__func__, *out, &d, &t);
        }
    return INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    BEGIN(NULL);
    for (int i = 0; i < t->devices; i++)
        if (!strcmp(t->device[i].uuid, uuid)) {
            *out = handle(uuid);
            return begin(__func__, *out, &d, &t);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *h, char *out, unsigned size) { BEGIN(h); snprintf(out, size, "%s", d->uuid); return OK; }
int nvmlDeviceGetName(void *h, char *out, unsigned size) { BEGIN(h); snprintf(out, size, "%s", d->name); return OK; }

int nvmlDeviceGetIndex(void *h, unsigned *out) {
    BEGIN(h);
    *out = 0;
    for (Device *other = t->device; other < d; other++) *out += other->parent < 0;
    return OK;
}

#define MIB (1ULL << 20)
int nvmlDeviceGetMemoryInfo(void *h, Memory *out) {
    BEGIN(h); /* version 1 counts what the driver reserves as used */
    out->total = (u64)d->total * MIB;
    out->used = (u64)(d->used + d->reserved) * MIB;
    out->free = out->total - out->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *h, Memory2 *out) {
    BEGIN(h);
    if (out->version != (sizeof *out | 2u << 24)) return 25;
    out->total = (u64)d->total * MIB;
    out->reserved = (u64)d->reserved * MIB;
    out->used = (u64)d->used * MIB;
    out->free = out->total - out->used - out->reserved;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *h, Utilisation *out) {
    BEGIN(h);
    if (d->parent >= 0) return NOT_SUPPORTED;
    out->gpu = (unsigned)d->utilisation;
    out->memory = 0;
    return OK;
}

int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *out) {
    BEGIN(h);
    if (sensor || d->parent >= 0) return NOT_SUPPORTED;
    *out = (unsigned)d->temperature;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(void *h, int kind, int counter, u64 *out) {
    BEGIN(h);
    if (d->ecc < 0 || d->parent >= 0) return NOT_SUPPORTED;
    *out = kind == 1 && counter == 0 ? (u64)d->ecc : 0;
    return OK;
}

int nvmlDeviceGetFieldValues(void *h, int count, FieldValue *out) {
    BEGIN(h);
    for (int i = 0; i < count; i++) {
        out[i].result = out[i].field == 230 && d->recovery >= 0 ? OK : NOT_SUPPORTED;
        out[i].type = 1;
        out[i].value.wide = 0;
        out[i].value.narrow = (unsigned)d->recovery;
    }
    return OK;
}

static int list(Table *t, Device *d, int mps, unsigned *count, ProcessInfo *out) {
    unsigned room = *count, n = 0;
    for (int i = 0; i < t->devices; i++) { /* of a whole device: its slices' too */
        Device *o = &t->device[i];
        if (o != d && (o->parent < 0 || &t->device[o->parent] != d)) continue;
        for (int p = 0; p < o->processes; p++) {
            if (o->process[p].mps != mps) continue;
            if (++n > room || !out) continue;
            long long used = o->process[p].used_mib;
            unsigned instance = o->parent < 0 ? ~0u : (unsigned)i;
            out[n - 1] = (ProcessInfo){o->process[p].pid, used < 0 ? ~0ULL : (u64)used * MIB, instance, ~0u};
        }
    }
    *count = n;
    return n > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, ProcessInfo *out) {
    BEGIN(h);
    return list(t, d, 0, count, out);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *count, ProcessInfo *out) {
    BEGIN(h);
    return list(t, d, 1, count, out);
}

int nvmlDeviceGetGpuInstanceId(void *h, unsigned *out) {
    BEGIN(h);
    if (d->parent < 0) return NOT_SUPPORTED;
    *out = (unsigned)(d - t->device);
    return OK;
}

int nvmlDeviceGetMigMode(void *h, unsigned *current, unsigned *pending) {
    BEGIN(h);
    if (d->mig < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)d->mig;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *out) { BEGIN(h); *out = d->mig > 0 ? 7 : 0; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned index, void **out) {
    BEGIN(h);
    for (int i = 0; i < t->devices; i++)
        if (t->device[i].parent >= 0 && &t->device[t->device[i].parent] == d && index-- == 0) {
            *out = handle(t->device[i].uuid);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) {
    BEGIN(h);
    if (d->parent < 0) return INVALID;
    *out = handle(t->device[d->parent].uuid);
    return OK;
}

int nvmlEventSetCreate(EventSet **out) {
    BEGIN(NULL);
    *out = calloc(1, sizeof **out);
    for (int i = 0; i < t->events; i++)
        if (t->event[i].number > (*out)->seen) (*out)->seen = t->event[i].number;
    return OK;
}

int nvmlEventSetFree(EventSet *set) { BEGIN(NULL); free(set); return OK; }
int nvmlDeviceGetSupportedEventTypes(void *h, u64 *out) { BEGIN(h); *out = 0xf; return OK; }

int nvmlDeviceRegisterEvents(void *h, u64 types, EventSet *set) {
    BEGIN(h);
    (void)types;
    (void)set;
    return d->parent >= 0 ? NOT_SUPPORTED : OK;
}

int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms) {
    for (unsigned waited = 0;; waited += 5) {
        BEGIN(NULL);
        for (int i = 0; i < t->events; i++) {
            Event *e = &t->event[i];
            if (e->number <= set->seen) continue;
            set->seen = e->number;
            *out = (EventData){strcmp(e->uuid, "-") ? handle(e->uuid) : NULL, e->type, e->data, ~0u, ~0u};
            return OK;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        nap(0.005);
    }
}
