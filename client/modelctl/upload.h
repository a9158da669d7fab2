// Carrying the bytes of a publish to the daemon: as descriptors over handles.sock, or as chunks
// over gRPC where descriptors cannot be passed. One thread.
#pragma once

#include <string>

#include "client/modelctl/context.h"
#include "client/modelctl/exit_code.h"
#include "client/modelctl/interrupts.h"
#include "client/modelctl/source_files.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {

// Connects to handles.sock and says hello. kUnreachable, kPermission, kOther (another ABI).
Outcome<UniqueFd> ConnectHandles(const std::string& path);

// Sends every file's descriptor, a frame at a time, so that no more than 64 are open at once. Each
// frame is acknowledged. `ticket` is from Control.Publish.
Exit SendDescriptors(const UniqueFd& socket, const SourceSet& files, const std::string& ticket,
                     Interrupts& interrupts);

// The whole of a streamed publish. `begin` has the announcement.
Outcome<v1::PublishResponse> StreamFiles(Context& context, Interrupts& interrupts,
                                         const std::string& what, const v1::PublishBegin& begin,
                                         const SourceSet& files);

}  // namespace modelhost::modelctl
