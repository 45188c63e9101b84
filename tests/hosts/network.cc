#include "tests/hosts/network.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <queue>
#include <span>

#include "core/error.h"
#include "io/files.h"

namespace moebius {

struct Network::Link {
  std::atomic<double> delay_s = 0, loss = 0, bytes_per_s = 0;
  std::atomic<bool> is_cut = false;
  std::atomic<int64_t> sent_bytes = 0, num_connects = 0;
};

struct Network::Board {
  struct Host {
    int net = -1, uts = -1;  // descriptors of its namespaces, in the process of the network
    ino_t net_inode = 0;
  };
  std::array<Host, kMaxHosts> hosts;
  int user = -1, mount = -1;  // namespaces of all hosts; user: -1 for root, who needs none
  std::array<std::array<Link, kMaxHosts>, kMaxHosts> links;
};

namespace {

using Clock = std::chrono::steady_clock;

// --- hosts ----------------------------------------------------------------------------------------------------------

void check_call(bool is_well, const char* what) { MOEBIUS_CHECK(io, is_well, "{}: {}", what, errno_text(errno)); }

int open_namespace(const char* kind) {
  const int fd = ::open(fmt::format("/proc/self/ns/{}", kind).c_str(), O_RDONLY | O_CLOEXEC);
  check_call(fd >= 0, "a namespace");
  return fd;
}

// A user becomes root of a namespace of users, in which only this user exists.
void become_root() {
  const uid_t user = ::getuid(), group = ::getgid();
  check_call(::unshare(CLONE_NEWUSER) == 0, "a namespace of users");
  const auto put = [](const char* file, const std::string& text) {
    std::ofstream(std::string("/proc/self/") + file) << text << std::flush;
  };
  put("setgroups", "deny");
  put("uid_map", fmt::format("0 {} 1", user));
  put("gid_map", fmt::format("0 {} 1", group));
}

ifreq request(const char* name) {
  ifreq r{};
  std::strncpy(r.ifr_name, name, IFNAMSIZ - 1);
  return r;
}

sockaddr address_of(const std::string& number) {
  sockaddr_in in{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {::inet_addr(number.c_str())}, .sin_zero = {}};
  sockaddr any{};
  std::memcpy(&any, &in, sizeof any);
  return any;
}

void bring_up(int control, const char* name) {
  ifreq r = request(name);
  check_call(::ioctl(control, SIOCGIFFLAGS, &r) == 0, name);
  r.ifr_flags |= IFF_UP;
  check_call(::ioctl(control, SIOCSIFFLAGS, &r) == 0, name);
}

// Makes the network device of the host that this process is on. What the host sends is read from it.
int make_device(const std::string& address) {
  const int tun = ::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  check_call(tun >= 0, "/dev/net/tun");
  ifreq r = request("tun0");
  r.ifr_flags = IFF_TUN | IFF_NO_PI;
  check_call(::ioctl(tun, TUNSETIFF, &r) == 0, "a device of /dev/net/tun");
  const int control = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  check_call(control >= 0, "a socket");
  r.ifr_addr = address_of(address);
  check_call(::ioctl(control, SIOCSIFADDR, &r) == 0, "an address");
  r.ifr_netmask = address_of("255.255.255.0");
  check_call(::ioctl(control, SIOCSIFNETMASK, &r) == 0, "a mask");
  bring_up(control, "tun0");
  bring_up(control, "lo");
  ::close(control);
  return tun;
}

// --- packets --------------------------------------------------------------------------------------------------------

struct Packet {
  Clock::time_point due;
  int64_t number = 0;  // packets that are due at once keep their order
  int to = 0;
  std::vector<unsigned char> bytes;
  bool operator<(const Packet& other) const {  // the first to leave is the largest
    return due != other.due ? due > other.due : number > other.number;
  }
};

constexpr size_t kIpHeader = 20, kTcpFlags = 13;

// Returns the last number of the address that an IPv4 packet goes to, less one; -1 for another packet.
int host_of(std::span<const unsigned char> packet) {
  return packet.size() >= kIpHeader && packet[0] >> 4 == 4 ? packet[19] - 1 : -1;
}

bool begins_connection(std::span<const unsigned char> packet) {
  const size_t header = (packet[0] & 15u) * 4u;
  if (packet[9] != IPPROTO_TCP || packet.size() <= header + kTcpFlags) return false;
  constexpr unsigned char kSyn = 2, kAck = 16;
  return (packet[header + kTcpFlags] & (kSyn | kAck)) == kSyn;
}

}  // namespace

// --- the process of the network -------------------------------------------------------------------------------------

// Reads what the hosts send until the test is over, and writes it to where it goes.
class Network::Relay {
 public:
  Relay(std::vector<int> devices, std::function<Link&(int from, int to)> link)
      : devices_(std::move(devices)), link_(std::move(link)), busy_until_(devices_.size() * devices_.size()) {}

  // Returns when the descriptor has an end: no process has the other end of the pipe open.
  void run(int alive) {
    std::vector<pollfd> polled{{.fd = alive, .events = POLLIN, .revents = 0}};
    for (const int device : devices_) polled.push_back({.fd = device, .events = POLLIN, .revents = 0});
    while (true) {
      const timespec wait = time_to_next();
      if (::ppoll(polled.data(), polled.size(), due_.empty() ? nullptr : &wait, nullptr) < 0) continue;
      if (polled[0].revents != 0) return;
      for (int host = 0; host < std::ssize(devices_); ++host)
        if (polled[host + 1].revents != 0) receive(host);
      deliver();
    }
  }

 private:
  timespec time_to_next() const {
    if (due_.empty()) return {};
    const auto left = std::max(Clock::duration(0), due_.top().due - Clock::now());
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    return {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
  }
  void receive(int from) {
    std::array<unsigned char, 1 << 16> bytes;
    for (ssize_t n = 0; (n = ::read(devices_[from], bytes.data(), bytes.size())) > 0;) {
      const std::span<const unsigned char> packet(bytes.data(), static_cast<size_t>(n));
      const int to = host_of(packet);
      if (to >= 0 && to < std::ssize(devices_) && to != from) accept(from, to, packet);
    }
  }
  void accept(int from, int to, std::span<const unsigned char> packet) {
    Link& link = link_(from, to);
    link.sent_bytes += std::ssize(packet);
    link.num_connects += begins_connection(packet) ? 1 : 0;
    if (link.is_cut || is_lost(link.loss)) return;
    Clock::time_point& busy_until = busy_until_[from * std::ssize(devices_) + to];
    busy_until = std::max(busy_until, Clock::now());
    if (link.bytes_per_s > 0) busy_until += seconds(static_cast<double>(packet.size()) / link.bytes_per_s);
    due_.push({.due = busy_until + seconds(link.delay_s),
               .number = num_packets_++,
               .to = to,
               .bytes = {packet.begin(), packet.end()}});
  }
  void deliver() {
    for (const Clock::time_point now = Clock::now(); !due_.empty() && due_.top().due <= now; due_.pop()) {
      const Packet& packet = due_.top();
      (void)!::write(devices_[packet.to], packet.bytes.data(), packet.bytes.size());
    }
  }
  static Clock::duration seconds(double s) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
  }
  bool is_lost(double share) {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;  // Knuth, MMIX
    return static_cast<double>(random_ >> 11) * 0x1p-53 < share;
  }

  const std::vector<int> devices_;
  const std::function<Link&(int, int)> link_;
  std::vector<Clock::time_point> busy_until_;  // by link: when it has sent what it got
  std::priority_queue<Packet> due_;
  int64_t num_packets_ = 0;
  uint64_t random_ = 1;
};

void Network::run_network(int from_test, int to_test) const {
  std::vector<int> devices;
  try {
    if (::unshare(CLONE_NEWNS) != 0) {
      become_root();
      check_call(::unshare(CLONE_NEWNS) == 0, "a namespace of mounts");
      board_->user = open_namespace("user");
    }
    check_call(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, "mounts of its own");
    std::string names = "127.0.0.1 localhost\n";
    for (int h = 0; h < num_hosts_; ++h) names += address(h) + " " + name(h) + "\n";
    std::string file = (std::filesystem::temp_directory_path() / "hosts-XXXXXX").string();
    const int opened = ::mkstemp(file.data());
    check_call(opened >= 0 && ::write(opened, names.data(), names.size()) == std::ssize(names), "a file of hosts");
    check_call(::fchmod(opened, 0644) == 0, "a file of hosts");
    const bool is_mounted = ::mount(file.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) == 0;
    ::unlink(file.c_str());
    check_call(is_mounted, "an /etc/hosts of its own");
    board_->mount = open_namespace("mnt");
    for (int h = 0; h < num_hosts_; ++h) {
      check_call(::unshare(CLONE_NEWNET | CLONE_NEWUTS) == 0, "a namespace of networks");
      check_call(::sethostname(name(h).c_str(), name(h).size()) == 0, "a host name");
      Board::Host& host = board_->hosts[h];
      host.net = open_namespace("net");
      host.uts = open_namespace("uts");
      struct stat status {};
      check_call(::fstat(host.net, &status) == 0, "a namespace");
      host.net_inode = status.st_ino;
      devices.push_back(make_device(address(h)));
    }
  } catch (const std::exception& e) {
    (void)!::write(to_test, e.what(), std::strlen(e.what()));
    ::_exit(0);
  }
  ::prctl(PR_SET_DUMPABLE, 1);  // else another process of this user may not open its namespaces
  ::close(to_test);             // the hosts are there
  Relay(std::move(devices), [this](int from, int to) -> Link& { return link(from, to); }).run(from_test);
  for (const pid_t process : processes()) ::kill(process, SIGKILL);
  ::_exit(0);
}

// --- the test's side ------------------------------------------------------------------------------------------------

Network::Network(int num_hosts) : num_hosts_(num_hosts) {
  MOEBIUS_ASSERT(num_hosts >= 1 && num_hosts <= kMaxHosts);
  void* shared = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  check_call(shared != MAP_FAILED, "shared memory");
  board_ = new (shared) Board;
  std::array<int, 2> alive{}, ready{};
  check_call(::pipe2(alive.data(), O_CLOEXEC) == 0 && ::pipe2(ready.data(), O_CLOEXEC) == 0, "a pipe");
  network_ = ::fork();
  check_call(network_ >= 0, "a process");
  if (network_ == 0) {
    ::close(alive[1]);
    ::close(ready[0]);
    run_network(alive[0], ready[1]);
  }
  ::close(alive[0]);
  ::close(ready[1]);
  alive_ = alive[1];
  std::array<char, 256> text{};
  for (ssize_t n = 0; (n = ::read(ready[0], text.data(), text.size())) > 0;) why_missing_.append(text.data(), n);
  ::close(ready[0]);
}

Network::~Network() {
  ::close(alive_);
  ::waitpid(network_, nullptr, 0);
  ::munmap(board_, sizeof(Board));
}

std::string Network::name(int host) { return fmt::format("host{}", host); }
std::string Network::address(int host) { return fmt::format("10.77.0.{}", host + 1); }

void Network::enter(int host) const {
  ::close(alive_);  // else this process would keep the network after the test
  const auto enter_one = [&](int descriptor) {
    const int fd = ::open(fmt::format("/proc/{}/fd/{}", network_, descriptor).c_str(), O_RDONLY | O_CLOEXEC);
    check_call(fd >= 0 && ::setns(fd, 0) == 0, "entering a namespace");
    ::close(fd);
  };
  const std::string folder = std::filesystem::current_path();
  if (board_->user >= 0) enter_one(board_->user);
  for (const int each : {board_->hosts[host].net, board_->hosts[host].uts, board_->mount}) enter_one(each);
  check_call(::chdir(folder.c_str()) == 0, "the folder, on the host");
}

void Network::write_agent(const std::string& path) const {
  std::string text = "#!/bin/sh\nhost=$1; shift\ncase $host in\n";
  for (int h = 0; h < num_hosts_; ++h)
    text += fmt::format("  {}) net={} uts={} ;;\n", name(h), board_->hosts[h].net, board_->hosts[h].uts);
  text += fmt::format("esac\nexec nsenter --net=/proc/{0}/fd/$net --uts=/proc/{0}/fd/$uts sh -c \"$*\"\n", network_);
  write_file_atomic(path, text);
  check_call(::chmod(path.c_str(), 0755) == 0, "a program");
}

Network::Link& Network::link(int from, int to) const { return board_->links[from][to]; }

void Network::set_link(int a, int b, const LinkQuality& quality) {
  for (Link* each : {&link(a, b), &link(b, a)}) {
    each->delay_s = quality.delay_s;
    each->loss = quality.loss;
    each->bytes_per_s = quality.bytes_per_s;
    each->is_cut = quality.is_cut;
  }
}

void Network::set_links(const LinkQuality& quality) {
  for (int a = 0; a < num_hosts_; ++a)
    for (int b = a + 1; b < num_hosts_; ++b) set_link(a, b, quality);
}

int64_t Network::sent_bytes(int from, int to) const { return link(from, to).sent_bytes; }
int64_t Network::num_connects(int from, int to) const { return link(from, to).num_connects; }

std::vector<pid_t> Network::processes() const {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const pid_t process = std::atoi(entry.path().filename().c_str());
    struct stat status {};
    if (process <= 0 || process == network_ || process == ::getpid()) continue;
    if (::stat((entry.path() / "ns/net").c_str(), &status) != 0) continue;
    for (int h = 0; h < num_hosts_; ++h)
      if (board_->hosts[h].net_inode == status.st_ino) found.push_back(process);
  }
  return found;
}

}  // namespace moebius
