#include "comm/transport/tcp_bootstrap.h"

#include <algorithm>
#include <functional>
#include <sstream>

#include "comm/transport/torch_store.h"
#include "core/error.h"

namespace moebius {
namespace {

constexpr uint64_t kMagic = 0x3173756962656f6d;  // "moebius1"
constexpr double kStrangerS = 5;                 // time in which a new connection must identify itself

// The first message of a rank on every connection.
struct Hello {
  uint64_t magic = kMagic;
  uint64_t run = 0;
  int32_t rank = 0, size = 0;
  int32_t port = 0;  // where it listens
  int32_t unused = 0;
};

uint64_t hash_of(const std::string& run) { return std::hash<std::string>{}(run); }

Hello hello_of(const TcpOptions& o, int port) {
  return {.run = hash_of(o.run), .rank = o.rank, .size = o.size, .port = port};
}

// A new connection. One from outside the run (a port scan, another run) is closed.
struct Visitor {
  Socket socket;
  Hello hello;
  std::string host;  // where it asks to be reached
};

bool read_visitor(const TcpOptions& o, Visitor& v, Deadline deadline) {
  try {
    const Deadline soon = std::min(deadline, deadline_in(kStrangerS));
    v.hello = read_value<Hello>(v.socket, soon, "a greeting");
    if (v.hello.magic != kMagic || v.hello.run != hash_of(o.run)) return false;
    v.host = read_text(v.socket, soon, "a greeting");
    return v.hello.rank >= 0 && v.hello.rank != o.rank;
  } catch (const Error&) {
    return false;
  }
}

void greet(const TcpOptions& o, const Socket& s, int port, Deadline deadline) {
  write_value(s, hello_of(o, port), deadline, "a greeting");
  write_text(s, o.host, deadline, "a greeting");
}

std::string missing_names(const TcpOptions& o, const std::vector<Socket>& sockets) {
  std::vector<int> missing;
  for (int r = 0; r < o.size; ++r)
    if (r != o.rank && !sockets[r].is_open()) missing.push_back(r);
  return names_of_ranks(o.world, missing);
}

// Accepts connections until `count` ranks have been let in.
void accept_ranks(const TcpOptions& o, const Socket& listener, int count, Deadline deadline,
                  std::vector<Socket>& sockets, const std::function<bool(const Visitor&)>& let_in) {
  for (int have = 0; have < count;) {
    Visitor v{.socket = accept_until(listener, deadline), .hello = {}, .host = {}};
    MOEBIUS_CHECK(distributed, v.socket.is_open(),
                  "tcp: {} has waited for {} s for the others to come; missing: {}; were they started, with the same "
                  "MASTER_ADDR, MASTER_PORT and WORLD_SIZE?",
                  name_of_rank(o.world, o.rank), o.world.timeout_s, missing_names(o, sockets));
    if (!read_visitor(o, v, deadline) || !let_in(v)) continue;
    sockets[v.hello.rank] = std::move(v.socket);
    ++have;
  }
}

// --- rank 0 ---------------------------------------------------------------------------------------------------------

std::string refusal(const TcpOptions& o, const Visitor& v, const std::vector<Socket>& sockets) {
  if (v.hello.size != o.size)
    return fmt::format(
        "tcp: rank {} was started with WORLD_SIZE={}, rank 0 with WORLD_SIZE={}; start all ranks with the same value",
        v.hello.rank, v.hello.size, o.size);
  if (v.hello.rank >= o.size || sockets[v.hello.rank].is_open())
    return fmt::format("tcp: RANK={} was given to two processes; give each its own number", v.hello.rank);
  return "";
}

// The table's first line is empty when all is well, else the reason why the run cannot begin.
// Then comes a line for each rank: host and port. An empty host is the one where rank 0 was found.
constexpr const char* kTable = "the table of ranks";

void tell_all(const std::vector<Socket>& sockets, const std::string& table, Deadline deadline) {
  for (const Socket& s : sockets)
    if (s.is_open()) write_text(s, table, deadline, kTable);
}

Socket listen_as_master(const TcpOptions& o) {
  try {
    return listen_at(o.has_store ? 0 : o.master.port, is_loopback(o.master.host));
  } catch (const Error& e) {
    MOEBIUS_FAIL(distributed, "{}; rank 0 listens at MASTER_PORT: choose one that is free, the same on all ranks",
                 e.what());
  }
}

std::string key_of(const TcpOptions& o) { return "moebius/" + o.run; }

std::vector<Socket> connect_as_master(const TcpOptions& o, Deadline deadline) {
  const Socket listener = listen_as_master(o);
  if (o.has_store) {
    TorchStore store(o.master, deadline);
    const std::string host = !o.host.empty() ? o.host : own_host(store.socket());
    store.set(key_of(o), fmt::format("{} {}", is_loopback(host) ? "-" : host, port_of(listener)));
  }
  std::vector<Socket> sockets(o.size);
  std::vector<HostPort> places(o.size);
  accept_ranks(o, listener, o.size - 1, deadline, sockets, [&](const Visitor& v) {
    const std::string why = refusal(o, v, sockets);
    if (!why.empty()) {
      write_text(v.socket, why + "\n", deadline, kTable);
      tell_all(sockets, why + "\n", deadline);
      throw Error(ErrorKind::usage, why);
    }
    const std::string host = !v.host.empty() ? v.host : peer_host(v.socket);
    places[v.hello.rank] = {.host = is_loopback(host) ? "-" : host, .port = v.hello.port};
    return true;
  });
  std::string table = "\n";
  for (const HostPort& p : places) table += fmt::format("{} {}\n", p.host.empty() ? "-" : p.host, p.port);
  tell_all(sockets, table, deadline);
  return sockets;
}

// --- the others -----------------------------------------------------------------------------------------------------

HostPort read_place(std::istream& from, const std::string& master_host) {
  HostPort place;
  from >> place.host >> place.port;
  if (place.host == "-") place.host = master_host;
  return place;
}

HostPort find_master(const TcpOptions& o, Deadline deadline) {
  if (!o.has_store) return o.master;
  std::istringstream entry(TorchStore(o.master, deadline).wait_for(key_of(o)));
  return read_place(entry, o.master.host);
}

std::string without_tcp(const std::string& error) { return error.starts_with("tcp: ") ? error.substr(5) : error; }

// Connects to rank 0 and returns its table.
// Another program may listen there instead: the error names the address.
std::string ask_master(const TcpOptions& o, const HostPort& master, int own_port, Deadline deadline, Socket& socket) {
  try {
    socket = connect_until(master, deadline);
    greet(o, socket, own_port, deadline);
    return read_text(socket, deadline, kTable);
  } catch (const Error& e) {
    MOEBIUS_FAIL(distributed, "tcp: {} gets no answer from a rank 0 of this run at {} ({}); check that {}",
                 name_of_rank(o.world, o.rank), to_string(master), without_tcp(e.what()),
                 o.has_store ? "this machine reaches that address, which rank 0 left with torchrun (MOEBIUS_HOST of "
                               "rank 0 sets another), and that all ranks were started"
                             : "MASTER_ADDR and MASTER_PORT are the same on all ranks, that nothing else uses that "
                               "port, and that all ranks were started");
  }
}

std::vector<Socket> connect_as_other(const TcpOptions& o, Deadline deadline) {
  const HostPort master = find_master(o, deadline);
  const Socket listener = listen_at(0, is_loopback(master.host));
  std::vector<Socket> sockets(o.size);
  std::istringstream table(ask_master(o, master, port_of(listener), deadline, sockets[0]));
  std::string why;
  std::getline(table, why);
  if (!why.empty()) throw Error(ErrorKind::usage, "");  // rank 0 reports it
  const std::string master_host = peer_host(sockets[0]);
  read_place(table, master_host);
  for (int r = 1; r < o.rank; ++r) {
    sockets[r] = connect_until(read_place(table, master_host), deadline);
    greet(o, sockets[r], 0, deadline);
  }
  accept_ranks(o, listener, o.size - 1 - o.rank, deadline, sockets, [&](const Visitor& v) {
    return v.hello.rank > o.rank && v.hello.rank < o.size && !sockets[v.hello.rank].is_open();
  });
  return sockets;
}

}  // namespace

std::vector<Socket> connect_all(const TcpOptions& o) {
  MOEBIUS_CHECK(usage, o.size >= 1 && o.rank >= 0 && o.rank < o.size,
                "tcp: a rank must be at least 0 and below the number of ranks; got rank {} of {}", o.rank, o.size);
  if (o.size == 1) return std::vector<Socket>(1);
  const Deadline deadline = deadline_in(o.world.timeout_s);
  return o.rank == 0 ? connect_as_master(o, deadline) : connect_as_other(o, deadline);
}

}  // namespace moebius
