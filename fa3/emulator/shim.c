/* What a kernel's own host code calls instead of the CUDA runtime, when the kernel is to be emulated.

   fa3/emulator/artefacts.py links this file with the object that the DSL exports for a kernel. The host code then runs
   as on a GPU machine: it loads the library, sets attributes, assembles TMA descriptors and launches; the launch goes to
   a callback. Only what that code is known to call is here, so that a new call fails at link time, by its name.

   Functions return a cudaError_t: 0 is success, 1 is cudaErrorInvalidValue. Why it was not 0 is in fa3_emulator_why. */

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEVICE_MAX_DYNAMIC_SMEM = 97, /* cudaDevAttrMaxSharedMemoryPerBlockOptin */
    KERNEL_STATIC_SMEM = 1,       /* CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES */
    SET_MAX_DYNAMIC_SMEM = 8,     /* cudaFuncAttributeMaxDynamicSharedMemorySize */
    SET_CARVEOUT = 9,             /* cudaFuncAttributePreferredSharedMemoryCarveout, a hint */
    SET_NON_PORTABLE_CLUSTER = 14 /* cudaFuncAttributeNonPortableClusterSizeAllowed */
};

enum { SM90_MAX_DYNAMIC_SMEM = 232448, DEFAULT_MAX_DYNAMIC_SMEM = 48 * 1024 };

/* cudaLaunchConfig_t */
struct config {
    uint32_t grid[3], block[3];
    uint64_t dynamic_smem;
    void *stream, *attributes;
    uint32_t attribute_count;
};

struct kernel {
    struct kernel *next;
    int max_dynamic_smem;
    char name[];
};

typedef int launch_callback(const struct config *, const char *kernel, int max_dynamic_smem, void **params);

static struct kernel *kernels;
static launch_callback *on_launch;
static char library;

/* ---- for Python */

/* The kernel's PTX, ended by 0. */
extern const char fa3_emulator_ptx[];
__asm__(".pushsection .rodata\n"
        ".globl fa3_emulator_ptx\n"
        "fa3_emulator_ptx:\n"
        ".incbin \"" PTX_FILE "\"\n"
        ".byte 0\n"
        ".popsection\n");

char fa3_emulator_why[512];

void fa3_emulator_on_launch(launch_callback *callback) {
    on_launch = callback;
    fa3_emulator_why[0] = 0;
}

static int refuse(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(fa3_emulator_why, sizeof fa3_emulator_why, format, values);
    va_end(values);
    return 1;
}

/* ---- the device */

int _cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}

int _cudaSetDevice(int device) { return device == 0 ? 0 : refuse("there is no device %d, only device 0", device); }

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = SM90_MAX_DYNAMIC_SMEM;
    return attribute == DEVICE_MAX_DYNAMIC_SMEM ? 0 : refuse("device attribute %d is not known", attribute);
}

/* ---- the library and its kernels */

int _cudaLibraryLoadData(void **made, const void *code, void *options, void **values, int count, void *more_options,
                         void **more_values, int more_count) {
    (void)code, (void)options, (void)values, (void)count, (void)more_options, (void)more_values, (void)more_count;
    *made = &library;
    return 0;
}

int _cudaLibraryGetKernel(void **found, void *from, const char *name) {
    (void)from;
    for (struct kernel *k = kernels; k; k = k->next)
        if (strcmp(k->name, name) == 0) {
            *found = k;
            return 0;
        }
    struct kernel *made = malloc(sizeof *made + strlen(name) + 1);
    if (!made) return refuse("no memory");
    strcpy(made->name, name);
    made->max_dynamic_smem = DEFAULT_MAX_DYNAMIC_SMEM;
    made->next = kernels;
    *found = kernels = made;
    return 0;
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)kernel, (void)device;
    *value = 0; /* host.py refuses PTX with static shared memory */
    return attribute == KERNEL_STATIC_SMEM ? 0 : refuse("kernel attribute %d is not known", attribute);
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    if (attribute == SET_CARVEOUT || attribute == SET_NON_PORTABLE_CLUSTER) return 0;
    if (attribute != SET_MAX_DYNAMIC_SMEM) return refuse("function attribute %d cannot be set", attribute);
    if (value < 0 || value > SM90_MAX_DYNAMIC_SMEM) return refuse("%d bytes of dynamic shared memory", value);
    ((struct kernel *)kernel)->max_dynamic_smem = value;
    return 0;
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    (void)device;
    return _cudaFuncSetAttribute(kernel, attribute, value);
}

int _cudaLaunchKernelEx(const struct config *config, void *kernel, void **params) {
    const struct kernel *k = kernel;
    return on_launch ? on_launch(config, k->name, k->max_dynamic_smem, params) : refuse("a launch outside of a call");
}

/* ---- the DSL's runtime: loading once, and errors in TVM-FFI's form */

int cuda_dialect_init_library_once(void **slot, int (*init)(void **), int (*load)(void **, int),
                                   void (*set_error)(const char *kind, const char *message)) {
    if (*slot) return 0;
    void *made = NULL;
    int error = init(&made);
    if (!error) error = load(&made, 0);
    if (!error)
        *slot = made;
    else
        set_error("RuntimeError", fa3_emulator_why);
    return error;
}

void cuda_dialect_unload_library_once(void **slot) { *slot = NULL; }

void CuteDSLRT_TVMFFISetRaisedCudaError(void (*set_error)(const char *kind, const char **parts, int count), int error) {
    char text[sizeof fa3_emulator_why + 32];
    const char *parts[1] = {text};
    snprintf(text, sizeof text, "CUDA error %d: %s", error, fa3_emulator_why);
    set_error("RuntimeError", parts, 1);
}
