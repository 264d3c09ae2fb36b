// Replays a tape that tests/helpers/tape_file.py has written, without Python: for sanitizers.
//
//   replay FILE NUM_THREADS NUM_RUNS
//
// Prints the checksum (CRC-32) of all memory of the tape after the runs.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../../kernels/naiad_kernels/native/src/tape.h"

namespace {

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "replay: %s\n", why);
  std::exit(2);
}

class File {
 public:
  explicit File(const char* path) : file_(std::fopen(path, "rb")) {
    if (!file_) fail("the file cannot be opened");
  }
  ~File() { std::fclose(file_); }

  void read(void* into, size_t bytes) {
    if (std::fread(into, 1, bytes, file_) != bytes) fail("the file is too short");
  }
  int64_t number() {
    int64_t value;
    read(&value, sizeof value);
    return value;
  }

 private:
  std::FILE* file_;
};

// Memory that the tape points into; where it was, and where it is now, aligned as torch aligns it.
struct Region {
  explicit Region(File& file) : address(file.number()), num_bytes(file.number()) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(num_bytes))) fail("there is too little memory");
    data.reset(static_cast<char*>(memory));
    file.read(memory, static_cast<size_t>(num_bytes));
  }
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  int64_t address, num_bytes;
  std::unique_ptr<char, Free> data;
};

// Every word that was an address in a region becomes the address there now.
void relocate(void* structs, size_t bytes, const std::vector<Region>& regions) {
  for (size_t at = 0; at + sizeof(int64_t) <= bytes; at += sizeof(int64_t)) {
    char* place = static_cast<char*>(structs) + at;
    int64_t word;
    std::memcpy(&word, place, sizeof word);
    for (const Region& region : regions) {
      if (word < region.address || word >= region.address + region.num_bytes) continue;
      const char* moved = region.data.get() + (word - region.address);
      std::memcpy(place, &moved, sizeof moved);
      break;
    }
  }
}

template <class Struct>
std::vector<Struct> structs(File& file) {
  const size_t bytes = static_cast<size_t>(file.number());
  if (bytes % sizeof(Struct)) fail("the file has structs of another size");
  std::vector<Struct> read(bytes / sizeof(Struct));
  file.read(read.data(), bytes);
  return read;
}

uint32_t crc32(const char* data, int64_t bytes, uint32_t crc) {
  crc = ~crc;
  for (int64_t i = 0; i < bytes; i++) {
    crc ^= static_cast<uint8_t>(data[i]);
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1)));
  }
  return ~crc;
}

}  // namespace

int main(int num_args, char** args) {
  if (num_args != 4) fail("usage: replay FILE NUM_THREADS NUM_RUNS");
  File file(args[1]);
  auto records = structs<NaiadRecord>(file);
  auto buffers = structs<NaiadBuffer>(file);
  auto steps = structs<NaiadStep>(file);
  std::vector<Region> regions;
  for (int64_t left = file.number(); left > 0; left--) regions.emplace_back(file);
  // The last region is the structs that the step points to.
  relocate(regions.back().data.get(), static_cast<size_t>(regions.back().num_bytes), regions);
  relocate(records.data(), records.size() * sizeof(NaiadRecord), regions);
  relocate(buffers.data(), buffers.size() * sizeof(NaiadBuffer), regions);
  relocate(steps.data(), steps.size() * sizeof(NaiadStep), regions);

  NaiadTeam* team = naiad_team_new(std::atoll(args[2]));
  if (!team) fail("the threads cannot be started");
  for (int64_t left = std::atoll(args[3]); left > 0; left--)
    if (naiad_run(team, records.data(), static_cast<int64_t>(records.size()), buffers.data(), steps.data(), nullptr))
      fail("the step is refused");
  naiad_team_free(team);

  uint32_t crc = 0;
  for (size_t i = 0; i + 1 < regions.size(); i++) crc = crc32(regions[i].data.get(), regions[i].num_bytes, crc);
  std::printf("%" PRIu32 "\n", crc);
}
