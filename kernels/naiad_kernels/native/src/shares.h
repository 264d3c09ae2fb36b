// How the members of a team share what is to be done.
#pragma once

#include <algorithm>
#include <cstdint>

namespace naiad {

// Shares of a member: few, so that taking them costs little, and more than one, so that others can help.
constexpr int64_t kMostSharesPerMember = 4;

// Things that can be computed independently of each other: `count` of them. There are no more shares than of about
// `least` each, and `grain` things that follow each other stay together.
struct Things {
  int64_t count, least = 1, grain = 1;
};

// How a stage is cut: the first `num_members` members have `shares_per_member` each.
struct Cut {
  Cut() = default;
  Cut(const Things& things, int64_t team_size)
      : num_members(std::clamp<int64_t>((things.count + things.least - 1) / things.least, 1, team_size)) {
    const int64_t most = (things.count + num_members - 1) / num_members;
    if (team_size > 1) shares_per_member = std::clamp<int64_t>(most / things.least, 1, kMostSharesPerMember);
  }
  int64_t num_shares() const { return num_members * shares_per_member; }

  int64_t num_members = 1, shares_per_member = 1;
};

// Of things that follow each other: [first, end). May be empty.
struct Range {
  int64_t first, end;
};

// One share of a stage. It belongs to a member, whose shares lie together, and is computed by some member.
struct Share {
  int64_t index;  // of `cut.num_shares()`
  Cut cut;
  int64_t computed_by;  // whose memory it may use
  int64_t stage;        // of all stages that the team has computed

  // Whether a thing is in this share, where those of a share need not lie together.
  bool has(int64_t thing) const { return thing % cut.num_shares() == index; }

  // The first thing in the same member's next share, likewise; −1: it has none.
  int64_t next() const { return (index + 1) % cut.shares_per_member == 0 ? -1 : index + 1; }

  // This share of some things.
  Range of(const Things& things) const { return part_of(member_of(things.count), things.grain); }

  // What the member that this share belongs to has of some things.
  Range member_of(int64_t count) const {
    const int64_t member = index / cut.shares_per_member;
    return {count * member / cut.num_members, count * (member + 1) / cut.num_members};
  }

  // What this share has of a member's things.
  Range part_of(const Range& things, int64_t grain) const {
    const int64_t part = index % cut.shares_per_member;
    const int64_t length = things.end - things.first, grains = (length + grain - 1) / grain;
    const auto border = [&](int64_t number) {
      const int64_t whole = (grains * number + cut.shares_per_member - 1) / cut.shares_per_member;
      return things.first + std::min(length, whole * grain);
    };
    return {border(part), border(part + 1)};
  }
};

}  // namespace naiad
