#include "comm/transport/tcp_bootstrap.h"

#include <functional>
#include <sstream>

#include "comm/transport/torch_store.h"
#include "core/error.h"

namespace moebius {
namespace {

Job job_of(const TcpOptions& o, const std::string& secret) { return {.secret = secret, .run = o.run}; }

RankGreeting greeting_of(const TcpOptions& o, int port) {
  return {.rank = o.rank, .size = o.size, .port = port, .host = o.host};
}

std::string missing_names(const TcpOptions& o, const std::vector<Socket>& sockets) {
  std::vector<int> missing;
  for (int r = 0; r < o.size; ++r)
    if (r != o.rank && !sockets[r].is_open()) missing.push_back(r);
  return names_of_ranks(o.world, missing);
}

// Accepts all other ranks.
void accept_ranks(const TcpOptions& o, HandshakeAcceptor& acceptor, Deadline deadline, std::vector<Socket>& sockets,
                  const std::function<void(const HandshakeAcceptor::Member&)>& check) {
  for (int have = 1; have < o.size; ++have) {
    std::optional<HandshakeAcceptor::Member> member = acceptor.next(deadline);
    MOEBIUS_CHECK(distributed, member,
                  "tcp: {} has waited for {} s for the others to come; missing: {}; were they started, with the same "
                  "MASTER_ADDR, MASTER_PORT, WORLD_SIZE and secret?{}",
                  name_of_rank(o.world, o.rank), o.world.timeout_before_steps_s(), missing_names(o, sockets),
                  acceptor.refused_text());
    check(*member);
    sockets[member->greeting.rank] = std::move(member->socket);
  }
}

// --- rank 0 ---------------------------------------------------------------------------------------------------------

std::string refusal(const TcpOptions& o, const RankGreeting& g, const std::vector<Socket>& sockets) {
  if (g.size != o.size)
    return fmt::format(
        "tcp: rank {} was started with WORLD_SIZE={}, rank 0 with WORLD_SIZE={}; start all ranks with the same value",
        g.rank, g.size, o.size);
  if (g.rank >= o.size || sockets[g.rank].is_open())
    return fmt::format("tcp: RANK={} was given to two processes; give each its own number", g.rank);
  return "";
}

// The first line of the table is empty, or the reason why the run cannot begin.
// Then comes a line for each rank: host and port. An empty host stands for the host at which rank 0 was reached.
constexpr const char* kTable = "the table of ranks";

// A rank that has ended meanwhile is skipped: the next use of its connection reports the error.
void tell_all(const std::vector<Socket>& sockets, const std::string& table, Deadline deadline) {
  for (const Socket& s : sockets) {
    try {
      if (s.is_open()) write_text(s, table, deadline, kTable);
    } catch (const Error&) {
    }
  }
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

// Writes to torchrun's store the address at which rank 0 listens, and the secret that it draws if none was given. A "-"
// instead means that the host is that of the store, or that the secret was given to all ranks. Returns the secret of
// the job.
std::string leave_in_store(const TcpOptions& o, int port, Deadline deadline) {
  TorchStore store(o.master, deadline);
  const std::string host = !o.host.empty() ? o.host : own_host(store.socket());
  const std::string drawn = o.secret.empty() ? draw_secret() : "";
  store.set(key_of(o), fmt::format("{} {} {}", is_loopback(host) ? "-" : host, port, drawn.empty() ? "-" : drawn));
  return drawn.empty() ? o.secret : drawn;
}

Rendezvous rendezvous_as_master(const TcpOptions& o, Deadline deadline) {
  Socket listener = listen_as_master(o);
  Rendezvous result{.sockets = std::vector<Socket>(o.size), .job = {}, .listener = {}, .places = {}};
  result.job = job_of(o, o.has_store ? leave_in_store(o, port_of(listener), deadline) : o.secret);
  HandshakeAcceptor acceptor(std::move(listener), result.job, o.rank, o.warn, /*expected=*/o.size);
  std::vector<HostPort> places(o.size);
  accept_ranks(o, acceptor, deadline, result.sockets, [&](const HandshakeAcceptor::Member& m) {
    const std::string why = refusal(o, m.greeting, result.sockets);
    if (!why.empty()) {
      write_text(m.socket, why + "\n", deadline, kTable);
      tell_all(result.sockets, why + "\n", deadline);
      throw Error(ErrorKind::usage, why);
    }
    const std::string host = !m.greeting.host.empty() ? m.greeting.host : peer_host(m.socket);
    places[m.greeting.rank] = {.host = is_loopback(host) ? "-" : host, .port = m.greeting.port};
  });
  std::string table = "\n";
  for (const HostPort& p : places) table += fmt::format("{} {}\n", p.host.empty() ? "-" : p.host, p.port);
  tell_all(result.sockets, table, deadline);
  return result;
}

// --- the others -----------------------------------------------------------------------------------------------------

HostPort read_place(std::istream& from, const std::string& master_host) {
  HostPort place;
  from >> place.host >> place.port;
  if (place.host == "-") place.host = master_host;
  return place;
}

// The address at which rank 0 listens, and the secret of the job.
struct Master {
  HostPort at;
  std::string secret;
};

Master find_master(const TcpOptions& o, Deadline deadline) {
  if (!o.has_store) return {.at = o.master, .secret = o.secret};
  std::istringstream entry(TorchStore(o.master, deadline).wait_for(key_of(o)));
  Master master{.at = read_place(entry, o.master.host), .secret = o.secret};
  std::string drawn;
  entry >> drawn;
  if (master.secret.empty() && drawn != "-") master.secret = drawn;
  return master;
}

std::string without_tcp(const std::string& error) { return error.starts_with("tcp: ") ? error.substr(5) : error; }

// Connects to rank 0 and returns its table.
// Another program may listen there instead: the error names the address.
std::string ask_master(const TcpOptions& o, const Master& master, int own_port, Deadline deadline, Socket& socket) {
  try {
    socket = connect_until(master.at, deadline);
    complete_handshake(socket, job_of(o, master.secret), greeting_of(o, own_port), 0, deadline);
    return read_text(socket, deadline, kTable);
  } catch (const Error& e) {
    MOEBIUS_FAIL(distributed, "tcp: {} gets no answer from a rank 0 of this run at {} ({}); check that {}",
                 name_of_rank(o.world, o.rank), to_string(master.at), without_tcp(e.what()),
                 o.has_store ? "this machine reaches that address, which rank 0 left with torchrun (MOEBIUS_HOST of "
                               "rank 0 sets another), that MOEBIUS_SECRET is the same on all ranks or on none, and "
                               "that all ranks were started"
                             : "MASTER_ADDR, MASTER_PORT and MOEBIUS_SECRET are the same on all ranks, that nothing "
                               "else uses that port, and that all ranks were started");
  }
}

// No rank connects to the last one, so it does not listen.
Rendezvous rendezvous_as_other(const TcpOptions& o, Deadline deadline) {
  const Master master = find_master(o, deadline);
  Rendezvous result{
      .sockets = std::vector<Socket>(o.size), .job = job_of(o, master.secret), .listener = {}, .places = {}};
  if (o.rank < o.size - 1) result.listener = listen_at(0, is_loopback(master.at.host));
  const int port = result.listener.is_open() ? port_of(result.listener) : 0;
  std::istringstream table(ask_master(o, master, port, deadline, result.sockets[0]));
  std::string why;
  std::getline(table, why);
  if (!why.empty()) throw Error(ErrorKind::usage, "");  // rank 0 reports it
  const std::string master_host = peer_host(result.sockets[0]);
  for (int r = 0; r < o.size; ++r) result.places.push_back(read_place(table, master_host));
  return result;
}

// A port that other machines can reach needs a secret.
void check_secret(const TcpOptions& o) {
  if (!o.secret.empty() || o.has_store || is_loopback(o.master.host)) return;
  const std::string text = fmt::format(
      "tcp: ranks on several machines let in only who knows the secret of the job; got none, with rank 0 at {}; set "
      "MOEBIUS_SECRET to the same random text on all ranks (openssl rand -hex 32 prints one), or MOEBIUS_SECRET_FILE "
      "to a file with it; ranks of one machine need none with MASTER_ADDR=127.0.0.1",
      to_string(o.master));
  throw Error(ErrorKind::usage, o.rank == 0 ? text : "");
}

}  // namespace

Rendezvous rendezvous(const TcpOptions& o) {
  MOEBIUS_CHECK(usage, o.size >= 1 && o.rank >= 0 && o.rank < o.size,
                "tcp: a rank must be at least 0 and below the number of ranks; got rank {} of {}", o.rank, o.size);
  if (o.size == 1) return {.sockets = std::vector<Socket>(1), .job = {}, .listener = {}, .places = {}};
  check_secret(o);
  const Deadline deadline = deadline_in(o.world.timeout_before_steps_s());
  return o.rank == 0 ? rendezvous_as_master(o, deadline) : rendezvous_as_other(o, deadline);
}

}  // namespace moebius
