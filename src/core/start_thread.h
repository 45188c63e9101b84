// How threads are started where the system may have none left.
#pragma once

#include <system_error>

namespace moebius {

// Throws Error{usage} that says how to have fewer threads, or more allowed.
[[noreturn]] void fail_to_start_thread(const std::system_error& why);

// Returns start(), which starts threads (std::thread, std::async). Throws Error{usage} if the system starts no more.
template <class Start>
auto start_thread(const Start& start) {
  try {
    return start();
  } catch (const std::system_error& e) {
    fail_to_start_thread(e);
  }
}

}  // namespace moebius
