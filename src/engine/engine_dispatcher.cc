// The choice of the dispatcher, which needs to know whose memory the ranks reach.
#include "engine/engine.h"
#include "model/moe/direct_window.h"

namespace moebius {
namespace {

// Returns the bytes of Life::comm of this rank with a dispatcher, from a dry run.
int64_t shared_bytes(const EngineSpec& spec, DispatcherKind dispatcher) {
  const auto world = make_dry_run_transport(spec.world->rank(), spec.world->size());
  EngineSpec dry = spec;
  dry.world = world.get();
  dry.dispatcher = dispatcher;
  dry.target = spec.device;
  dry.device = DeviceKind::null;
  return Engine(dry).plan().bytes(Life::comm);
}

}  // namespace

void Engine::choose_dispatcher(DispatcherKind asked) {
  EngineSpec open = spec_;
  open.dispatcher = asked;
  dispatcher_ = dispatcher_choice(open);
  const bool dispatches = dispatcher_.kind != DispatcherKind::automatic;
  if (asked == DispatcherKind::automatic && dispatches && spec_.use == ModelUse::training &&
      spec_.device != DeviceKind::null) {
    Stream s = stream();
    const auto bytes_of = [&](DispatcherKind kind) { return shared_bytes(open, kind); };
    dispatcher_ = dispatcher_choice(open, peer_reach(s, mesh_, bytes_of));
  }
  spec_.dispatcher = dispatcher_.kind;
}

}  // namespace moebius
