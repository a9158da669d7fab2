/* libmodelhost: read-only views of model weights that the daemon of this machine holds.
 *
 *   mh_client --acquire--> mh_handle --tensor--> pointer, shape, dtype
 *                              |------file-----> bytes and a /proc/self/fd path
 *   mh_client --follow---> mh_live   --adopt---> mh_handle of the newest version, when you say so
 *
 * A handle is a snapshot: its tensors stay mapped, unchanged and at one address while it lives,
 * also after a swap and after the daemon's death. While the daemon is away everything that is
 * mapped goes on; the library reconnects by itself and takes its leases up again.
 *
 * Units       sizes in bytes, times in milliseconds, shapes and strides in elements (outermost
 *             first).
 * Threads     any thread may call anything at any time, but: mh_disconnect of a client, mh_release
 *             of the last reference to a handle and mh_live_release must not run while another
 *             thread uses that object; mh_live_adopt of one mh_live is for one thread at a time.
 * Ownership   what a function returns through a pointer to a pointer is yours to release. Strings,
 *             shapes and bytes in views belong to the handle and live as long as it does.
 * Errors      a canonical status, and a text in an mh_error that you own. A text says what failed,
 *             why, and what to do. Nothing here throws, prints, raises signals or ends the process.
 * Structs     start with their size, which the caller sets: use the MH_..._INIT macros. A library
 *             that knows fewer fields than the caller refuses those that are not zero; one that
 *             knows more uses defaults.
 * fork        a child may go on reading what is mapped on the host. The session and its leases stay
 *             with the parent: calls that need the daemon return MH_FAILED_PRECONDITION in the
 *             child, which may connect again for itself. Device memory is dead in the child
 *             (device_data is NULL), and so is CUDA: once a process has used it, device memory is
 *             MH_FAILED_PRECONDITION in what it forks, until that calls exec.
 * GPUs        the driver is loaded (libcuda.so.1) when device memory is first asked for, and never
 *             before. Calls that make device memory known to the driver may take long, as any call
 *             of a driver; they change neither the current context of your thread nor its errors.
 */
#ifndef MODELHOST_MODELHOST_H_
#define MODELHOST_MODELHOST_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MH_API __attribute__((visibility("default")))
#else
#define MH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define MH_ABI_VERSION 1u

/* The ABI of the loaded library; this header is MH_ABI_VERSION. Equal numbers fit together. */
MH_API uint32_t mh_abi_version(void);

/* --- Errors ---------------------------------------------------------------------------------- */

/* Canonical codes, numbered as google.rpc.Code. */
typedef enum mh_status {
  MH_OK = 0,
  MH_CANCELLED = 1,
  MH_UNKNOWN = 2,
  MH_INVALID_ARGUMENT = 3,
  MH_DEADLINE_EXCEEDED = 4,
  MH_NOT_FOUND = 5,
  MH_ALREADY_EXISTS = 6,
  MH_PERMISSION_DENIED = 7,
  MH_RESOURCE_EXHAUSTED = 8,
  MH_FAILED_PRECONDITION = 9,
  MH_ABORTED = 10,
  MH_OUT_OF_RANGE = 11,
  MH_UNIMPLEMENTED = 12,
  MH_INTERNAL = 13,
  MH_UNAVAILABLE = 14,
  MH_DATA_LOSS = 15,
  MH_UNAUTHENTICATED = 16
} mh_status;

/* "NOT_FOUND" and so on; "UNKNOWN" for a number that is none. A constant. */
MH_API const char* mh_status_name(mh_status status);

/* Where a call writes why it failed; NULL when you do not want to know. On success `status` is
 * MH_OK and `message` is empty. Longer texts are cut at a character. This struct never grows. */
typedef struct mh_error {
  mh_status status;
  char message[512];
} mh_error;

/* --- Client ---------------------------------------------------------------------------------- */

typedef struct mh_client mh_client;
typedef struct mh_handle mh_handle;
typedef struct mh_live mh_live;
typedef struct mh_live_set mh_live_set;

typedef struct mh_options {
  size_t size;             /* sizeof(mh_options) */
  const char* runtime_dir; /* Directory of handles.sock. NULL: $MODELHOST_RUNTIME_DIR, else the
                              user's (${XDG_RUNTIME_DIR:-/tmp/modelhost-$UID}/modelhost), else
                              /run/modelhost; the first of the last two that has a socket. */
  uint64_t deadline_ms; /* For every wait of this client that has no deadline of its own, also for
                           a daemon that is not there yet. 0: 5000. */
  int (*interrupted)(void* context); /* NULL, or asked several times a second while a call of this
                                        client waits for the daemon, on the calling thread: other
                                        than 0 ends the call with MH_CANCELLED. For programs that
                                        look at signals themselves. It may call the library, but
                                        with this client only mh_close. */
  void* context;                     /* For `interrupted`; good as long as the client and all
                                        handles of it. */
} mh_options;
#define MH_OPTIONS_INIT \
  { sizeof(mh_options), NULL, 0, NULL, NULL }

/* Connects. `options` NULL means all defaults. NULL on failure:
 *   MH_UNAVAILABLE        no daemon until the deadline; the text names the sockets tried
 *   MH_DEADLINE_EXCEEDED  a daemon that accepts but does not answer
 *   MH_PERMISSION_DENIED  you may not connect
 *   MH_RESOURCE_EXHAUSTED RLIMIT_NOFILE
 *   MH_INVALID_ARGUMENT, MH_UNIMPLEMENTED (another ABI) */
MH_API mh_client* mh_connect(const mh_options* options, mh_error* error);

/* Ends the session and all its leases. Handles stay valid, without a lease; what needs the daemon
 * fails on them from now on. Live models of this client adopt no more. NULL is allowed. */
MH_API void mh_disconnect(mh_client* client);
/* Does the same while other threads may be using the client: their calls that wait end at once, and
 * later ones too, with MH_FAILED_PRECONDITION, and the descriptor of events is readable. The client
 * is still to be disconnected, which then frees it. */
MH_API void mh_close(mh_client* client);

typedef struct mh_client_view {
  size_t size;        /* sizeof(mh_client_view) */
  const char* socket; /* The path in use; lives as long as the client. */
  uint64_t epoch;     /* +1 at every start of the daemon. */
  uint32_t connected; /* 0 while the daemon is away. */
  uint32_t leases;    /* Held by this client, also those to be declared again. */
  uint64_t reconnects;
} mh_client_view;
#define MH_CLIENT_VIEW_INIT \
  { sizeof(mh_client_view), NULL, 0, 0, 0, 0 }

MH_API mh_status mh_client_state(const mh_client* client, mh_client_view* view);

/* A descriptor that is readable when something changed: a label moved, a version drains, a live
 * model can adopt, the daemon came or went. It may be readable with no change. For poll and epoll;
 * clear it with mh_clear_events, then look (mh_superseded, mh_live_adopt). Belongs to the client;
 * do not close it. -1 when no descriptor or thread can be had, or in a forked child. The first call
 * starts to listen. */
MH_API int mh_event_fd(mh_client* client);
MH_API void mh_clear_events(mh_client* client);

/* Which version a reference names now, and its label's generation (0 for "model@N"), read from the
 * shared page: no lease, no round trip. MH_NOT_FOUND: no such label, or the page has no room for it
 * (4,096 labels; the text says so). A fixed version is not checked. */
MH_API mh_status mh_resolve(const mh_client* client, const char* ref, uint64_t* version,
                            uint64_t* generation, mh_error* error);

/* --- Handles --------------------------------------------------------------------------------- */

enum {
  MH_WANT_HOST = 0,         /* Mapped host memory alone. */
  MH_WANT_DEVICE = 1,       /* Also the copy that modelhostd holds on a GPU; without one the call
                               fails. */
  MH_WANT_DEVICE_IF_ANY = 2 /* Also that, if it can be had; mh_handle_device_reason says why not. */
};

enum {
  /* Of mh_follow, with MH_WANT_DEVICE: every version is seen at the same device addresses, which
   * are changed by mh_live_remap alone. For CUDA graphs. */
  MH_DEVICE_SAME_ADDRESSES = 1
};

typedef struct mh_acquire_options {
  size_t size;          /* sizeof(mh_acquire_options) */
  uint32_t wait;        /* 1: until the version is READY or the deadline. 0: fail at once. */
  uint32_t want;        /* MH_WANT_... */
  uint64_t deadline_ms; /* For the whole call. 0: the client's. */
  const char* gpu;      /* With a want: UUID of the GPU ("GPU-1b4e28ba-..."). NULL: that of the CUDA
                           context that is current on the calling thread, else the first that this
                           process sees (CUDA_VISIBLE_DEVICES). */
  uint32_t device_flags; /* MH_DEVICE_... */
  uint32_t reserved;     /* 0 */
} mh_acquire_options;
#define MH_ACQUIRE_OPTIONS_INIT \
  { sizeof(mh_acquire_options), 0, 0, 0, NULL, 0, 0 }

/* Takes a lease on a version and maps it. `ref` is "planner" (= "planner:stable"), "planner:canary"
 * or "planner@7". `options` NULL means no waiting. On failure `*handle` is untouched:
 *   MH_NOT_FOUND           no such model, label or version; near names are in the text
 *   MH_FAILED_PRECONDITION not READY (and `wait` is 0)
 *   MH_DEADLINE_EXCEEDED   still not READY; or no answer
 *   MH_PERMISSION_DENIED   you may not read this model
 *   MH_RESOURCE_EXHAUSTED  RLIMIT_NOFILE or address space of this process, or a limit of the daemon
 *                          (with MH_WANT_DEVICE also of the GPU)
 *   MH_DATA_LOSS           what came is not sealed, not of the size claimed, or a broken index
 *   MH_UNIMPLEMENTED       a daemon of another ABI; the text says what to update
 *   MH_UNAVAILABLE         no daemon until the deadline
 * With MH_WANT_DEVICE also MH_FAILED_PRECONDITION: no driver, no such GPU in this process, no copy
 * on that GPU, or a driver that cannot take it; the text says which. The handle retains the primary
 * context of the GPU, the one that the CUDA run-time and the frameworks use, and its device
 * pointers are good in that context. */
MH_API mh_status mh_acquire(mh_client* client, const char* ref, const mh_acquire_options* options,
                            mh_handle** handle, mh_error* error);

/* The same for `count` references (1 to 32), all resolved from one snapshot of the labels: either
 * all of `handles` are set or none. */
MH_API mh_status mh_acquire_set(mh_client* client, const char* const* refs, size_t count,
                                const mh_acquire_options* options, mh_handle** handles,
                                mh_error* error);

/* One more reference to the same handle, to be released like any other. */
MH_API mh_handle* mh_retain(const mh_handle* handle);
/* Drops a reference. The last one unmaps and gives the lease back; it does not wait for the daemon.
 * All views of the handle are dead then. NULL is allowed. */
MH_API void mh_release(mh_handle* handle);
/* The same without unmapping, which takes time where there are gigabytes: the library's thread does
 * that soon afterwards, and then gives the lease back. In a forked child, and for a handle that has
 * memory of a GPU, it is mh_release: no other thread may call the driver while a process ends. */
MH_API void mh_release_later(mh_handle* handle);

MH_API const char* mh_handle_model(const mh_handle* handle);
MH_API const char* mh_handle_label(const mh_handle* handle); /* "" for a fixed version. */
MH_API uint64_t mh_handle_version(const mh_handle* handle);
MH_API uint64_t mh_handle_generation(const mh_handle* handle); /* 0 for a fixed version. */
MH_API const char* mh_handle_digest(const mh_handle* handle);  /* SHA-256, 64 hex digits. */
MH_API const char* mh_handle_format(const mh_handle* handle);  /* "safetensors", "gguf", ... */

/* UUID of the GPU that the handle has device memory on; "" without. */
MH_API const char* mh_handle_gpu(const mh_handle* handle);
/* How: "vmm_fd", "host_direct", "host_registered", "cuda_ipc", or "none".
 *
 * - vmm_fd: mapped read-only by the GPU. A kernel that stores there ends its own context and harms
 *   nobody else. The right is this mapping's: it protects against bugs, not against a process that
 *   is out to harm.
 * - host_direct: the GPU reads the mapped host memory, read-only as that is.
 * - host_registered: host memory that is mapped writable; nothing protects it.
 * - cuda_ipc: a legacy handle. Nothing protects it, and it is good while the device agent of
 *   modelhostd lives. */
MH_API const char* mh_handle_device_mode(const mh_handle* handle);
/* Why the handle has no device memory; "" when it has. */
MH_API const char* mh_handle_device_reason(const mh_handle* handle);

/* 1 when the label that the handle was acquired by has moved since, else 0. One atomic load of a
 * shared page: fit for every turn of a control loop. Always 0 for a fixed version, and for a label
 * that the page has no room for (mh_follow follows it all the same). */
MH_API int mh_superseded(const mh_handle* handle);

/* --- Tensors --------------------------------------------------------------------------------- */

enum {
  MH_TENSOR_MAPPABLE = 1 /* The bytes at `data` are the values as they are. */
};

typedef struct mh_tensor_view {
  size_t size;             /* In: sizeof(mh_tensor_view). */
  mh_error* error;         /* In: where to write why it failed, or NULL. */
  const char* name;        /* Bare, without its component. */
  const char* component;   /* The weight set of the version that it is part of. */
  const char* file;        /* The file of the version that it is in. */
  const char* dtype;       /* "F32", "BF16", "Q4_K", ...; "INVALID" if newer than this library. */
  uint32_t dtype_code;     /* A stable number for it. */
  uint32_t flags;          /* MH_TENSOR_... */
  uint32_t rank;           /* How many numbers `shape` has; 0 for a scalar. */
  uint32_t alignment;      /* Of `data`, in bytes; at most 2 MiB. */
  const int64_t* shape;    /* In elements, outermost first. */
  const int64_t* strides;  /* In elements, outermost first; NULL: row-major without gaps. */
  uint64_t nbytes;         /* Of the range at `data`. */
  const void* data;        /* On the host, read-only. NULL when not mappable, or nbytes is 0. */
  const void* device_data; /* On the GPU of mh_handle_gpu, at a multiple of 512 bytes (with
                              host_direct at `data`). NULL: not on it, or nbytes is 0. */
  uint32_t block_elements; /* Consecutive elements in one block of a quantised type; 1 otherwise. */
  uint32_t block_bytes;    /* Bytes of a block; 0 for plain types. */
  const char* reason;      /* Why it is not mappable; "" otherwise. */
} mh_tensor_view;
#define MH_TENSOR_VIEW_INIT                                                                      \
  {                                                                                              \
    sizeof(mh_tensor_view), NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0, NULL, NULL, 0, NULL, NULL, \
        0, 0, NULL                                                                               \
  }

/* Looks a tensor up by its bare name or, when two components have it, by "component/name". No call
 * to the daemon, no system call, no allocation when it succeeds.
 *   MH_NOT_FOUND         none of this name; near names are in the text
 *   MH_INVALID_ARGUMENT  several components have it; the text says which
 *   MH_DATA_LOSS         the index is broken */
MH_API mh_status mh_tensor(const mh_handle* handle, const char* name, mh_tensor_view* view);
MH_API size_t mh_tensor_count(const mh_handle* handle);
/* By number, sorted by name. MH_OUT_OF_RANGE, MH_DATA_LOSS. */
MH_API mh_status mh_tensor_at(const mh_handle* handle, size_t number, mh_tensor_view* view);

/* --- Files, metadata, components ---------------------------------------------------------------
 */

typedef struct mh_file_view {
  size_t size;           /* In: sizeof(mh_file_view). */
  mh_error* error;       /* In: where to write why it failed, or NULL. */
  const char* path;      /* In the version, with '/' between parts. */
  const char* role;      /* "weights" or "sidecar". */
  uint64_t nbytes;       /* Its length. */
  const uint8_t* digest; /* SHA-256, 32 bytes. */
  const void* data; /* The bytes, read-only. NULL when nbytes is 0, or not fetched (mh_file_at). */
  const char* fd_path; /* "/proc/self/fd/N", good while the handle lives; NULL when not fetched. */
  int fd; /* That descriptor, read-only and close-on-exec. Do not close it. -1 likewise. */
  int reserved;
} mh_file_view;
#define MH_FILE_VIEW_INIT \
  { sizeof(mh_file_view), NULL, NULL, NULL, 0, NULL, NULL, NULL, -1, 0 }

/* One file of the version, as bytes and as a path that any program of this process can open. The
 * first call for a file asks the daemon for its descriptor, and the handle keeps it; later ones
 * cost nothing.
 *   MH_NOT_FOUND           no such file; near names are in the text
 *   MH_RESOURCE_EXHAUSTED  RLIMIT_NOFILE
 *   MH_UNAVAILABLE, MH_DEADLINE_EXCEEDED  no daemon, and the file was not fetched before
 *   MH_FAILED_PRECONDITION after mh_disconnect or in a forked child
 *   MH_DATA_LOSS */
MH_API mh_status mh_file(const mh_handle* handle, const char* path, mh_file_view* view);
MH_API size_t mh_file_count(const mh_handle* handle);
/* By number, sorted by path. Fetches nothing. MH_OUT_OF_RANGE, MH_DATA_LOSS. */
MH_API mh_status mh_file_at(const mh_handle* handle, size_t number, mh_file_view* view);

/* Metadata of the model files: UTF-8 text, numbers and arrays as JSON. Keys are "component/key"
 * when several components have metadata. NULL: no such key. `length`, in bytes without the NUL, may
 * be NULL. */
MH_API const char* mh_metadata(const mh_handle* handle, const char* key, size_t* length);
MH_API size_t mh_metadata_count(const mh_handle* handle);
MH_API mh_status mh_metadata_at(const mh_handle* handle, size_t number, const char** key,
                                const char** value);

MH_API size_t mh_component_count(const mh_handle* handle);
MH_API mh_status mh_component_at(const mh_handle* handle, size_t number, const char** name,
                                 const char** format);

/* As memcpy, but a page that cannot be had (a store file truncated in place, a failing disk) is
 * MH_DATA_LOSS and not SIGBUS; part of `to` may have been written then. It needs no signal handler.
 * For residency `sealed` it is never needed. MH_RESOURCE_EXHAUSTED, MH_INVALID_ARGUMENT. */
MH_API mh_status mh_copy(void* to, const void* from, size_t nbytes);

/* --- Following a label -------------------------------------------------------------------------
 */

/* Acquires `ref` and goes on following it: when its label moves, a thread of the library attaches
 * the next version in the background, and mh_live_adopt hands it over at a moment that you choose.
 * Errors as mh_acquire; also MH_RESOURCE_EXHAUSTED when no thread can be had.
 *
 * With MH_DEVICE_SAME_ADDRESSES the next version is imported in the background but not mapped:
 * only mh_live_remap changes what is at the addresses. MH_UNIMPLEMENTED unless the GPU's mode is
 * vmm_fd. */
MH_API mh_status mh_follow(mh_client* client, const char* ref, const mh_acquire_options* options,
                           mh_live** live, mh_error* error);

/* The newest version that is attached, but for MH_DEVICE_SAME_ADDRESSES: there it is the current
 * one, always. When it is not the one returned before, that one is released
 * (in the background: unmapping gigabytes takes time) and its views are dead: mh_retain it to keep
 * it. Never blocks, never fails. The handle belongs to `live`. */
MH_API const mh_handle* mh_live_adopt(mh_live* live);
/* The version adopted last; adopts nothing. */
MH_API const mh_handle* mh_live_current(const mh_live* live);
/* Of a live model with MH_DEVICE_SAME_ADDRESSES: adopts the newest version that is attached. Its
 * device memory takes the place of the old one's, at the same addresses, so that a captured CUDA
 * graph goes on with new weights. Call it when no kernel that reads them is under way or can start:
 * the library cannot know. `*handle` (which may be NULL) is the current version in any case; its
 * host pointers are new after a change, and those of the old one are dead as with mh_live_adopt. Of
 * a handle that you have retained the device memory is gone (device_data is NULL), the rest stays.
 * As mh_live_adopt for one thread at a time. MH_OK too when there was nothing newer.
 *
 * - MH_FAILED_PRECONDITION: the new version's tensors differ in name, type, shape, size or place,
 * or its segments in size; the text names the first difference. The old version stays, also at
 * later calls, until a newer one fits. Also: a live model without the flag, or a forked child.
 * - MH_RESOURCE_EXHAUSTED, MH_FAILED_PRECONDITION: the driver does not map it; the old one is back.
 * - MH_DATA_LOSS: likewise; or not even the old one can be mapped again, nothing is there, and a
 *   later call tries again. */
MH_API mh_status mh_live_remap(mh_live* live, const mh_handle** handle, mh_error* error);
/* MH_OK, or why the last attempt to attach a newer version failed; it is tried again. */
MH_API mh_status mh_live_status(const mh_live* live, mh_error* error);
MH_API void mh_live_release(mh_live* live);

/* Several models that must change together (without MH_DEVICE_SAME_ADDRESSES): acquired from one
 * snapshot, adopted all at once. Members that did not change keep their handle. */
MH_API mh_status mh_follow_set(mh_client* client, const char* const* refs, size_t count,
                               const mh_acquire_options* options, mh_live_set** live,
                               mh_error* error);
/* Writes the `count` handles in the order of the references (`count` as in mh_follow_set, or
 * fewer). 1 when a newer set was adopted, else 0. */
MH_API int mh_live_set_adopt(mh_live_set* live, const mh_handle** handles, size_t count);
MH_API mh_status mh_live_set_status(const mh_live_set* live, mh_error* error);
MH_API void mh_live_set_release(mh_live_set* live);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MODELHOST_MODELHOST_H_ */
