#include "daemon/format/wire_reader.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/onnx_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Proto;
using testing::VarintBytes;

// A reader over bytes of its own.
class Input {
 public:
  explicit Input(std::string bytes)
      : bytes_(std::move(bytes)),
        in_("m", "hint", std::as_bytes(std::span<const char>(bytes_))),
        wire_(in_) {}
  WireReader& wire() { return wire_; }
  ByteReader& in() { return in_; }
  // All fields are stepped over; the error, or "good".
  std::string Walk() {
    wire_.Fields([this](const WireField& field) { return wire_.Skip(field); });
    return in_.ok() ? "good" : std::string(in_.status().message());
  }

 private:
  std::string bytes_;
  ByteReader in_;
  WireReader wire_;
};

std::string Walk(const std::string& bytes) { return Input(bytes).Walk(); }

TEST(WireReaderTest, ReadsNumbersOfAllLengths) {
  for (const uint64_t value : {uint64_t{0}, uint64_t{1}, uint64_t{127}, uint64_t{128},
                               uint64_t{1} << 32, uint64_t{1} << 63, UINT64_MAX}) {
    Input input(VarintBytes(value));
    uint64_t read = 1;
    ASSERT_TRUE(input.wire().Varint("n", &read)) << value;
    EXPECT_EQ(read, value);
    EXPECT_EQ(input.in().remaining(), 0u);
  }
  // More bytes than needed are good, as for Protobuf.
  Input padded(std::string("\x85\x80\x00", 3));
  uint64_t five = 0;
  EXPECT_TRUE(padded.wire().Varint("n", &five));
  EXPECT_EQ(five, 5u);
}

TEST(WireReaderTest, RefusesNumbersOfMoreThan64Bits) {
  for (const std::string& bytes :
       {std::string(10, '\xff'), std::string(9, '\xff') + "\x02", std::string(20, '\x80')}) {
    Input input(bytes);
    uint64_t value = 77;
    EXPECT_FALSE(input.wire().Varint("n", &value));
    EXPECT_EQ(value, 77u);
    EXPECT_THAT(std::string(input.in().status().message()), HasSubstr("too many bytes"));
  }
}

TEST(WireReaderTest, StepsOverEveryWireType) {
  Proto message;
  message.Varint(1, 300).Tag(2, 1).Raw("12345678").Bytes(3, "abc").Tag(4, 5).Raw("1234");
  message.Tag(9, 3).Varint(1, 2).Tag(8, 3).Tag(8, 4).Tag(9, 4).Varint((1u << 29) - 1, 1);
  EXPECT_EQ(Walk(message.bytes()), "good");
  EXPECT_EQ(Walk(""), "good");
  EXPECT_THAT(Walk(Proto().Tag(1, 6).bytes()), HasSubstr("wire type 6"));
  EXPECT_THAT(Walk(Proto().Tag(1, 7).bytes()), HasSubstr("wire type 7"));
  EXPECT_THAT(Walk(std::string(1, '\0')), HasSubstr("number 0"));
  EXPECT_THAT(Walk(VarintBytes(uint64_t{1} << 32 | 8) + "x"), HasSubstr("wrong tag"));
  EXPECT_THAT(Walk(std::string(5, '\x80') + "\x01"), HasSubstr("too many bytes"));
}

TEST(WireReaderTest, GroupsEndAsTheyBegin) {
  EXPECT_THAT(Walk(Proto().Tag(9, 4).bytes()), HasSubstr("without its begin"));
  EXPECT_THAT(Walk(Proto().Tag(9, 3).Tag(8, 4).bytes()), HasSubstr("is ended by"));
  EXPECT_THAT(Walk(Proto().Tag(9, 3).Varint(1, 1).bytes()), HasSubstr("no end"));
  const auto nested = [](int depth) {
    Proto groups;
    for (int i = 0; i < depth; ++i) groups.Tag(9, 3);
    for (int i = 0; i < depth; ++i) groups.Tag(9, 4);
    return groups.bytes();
  };
  EXPECT_EQ(Walk(nested(100)), "good");
  EXPECT_THAT(Walk(nested(101)), HasSubstr("100 deep"));
  EXPECT_THAT(Walk(nested(1'000'000)), HasSubstr("100 deep"));
}

TEST(WireReaderTest, AMessageCannotReachPastTheOneAroundIt) {
  // The inner message claims a byte of the outer one.
  Input input(Proto().Bytes(1, Proto().Tag(2, 2).Raw("\x02x").bytes()).Varint(3, 1).bytes());
  WireField field;
  ASSERT_TRUE(input.wire().Next(&field));
  EXPECT_FALSE(input.wire().Message(
      "outer", [&](const WireField& inner) { return input.wire().Skip(inner); }));
  EXPECT_THAT(std::string(input.in().status().message()),
              HasSubstr("needs 2 bytes, but only 1 are left before byte 5"));
}

TEST(WireReaderTest, MessagesAreNestedAtMost100Deep) {
  const auto depth_reached = [](int depth) {
    Proto message;
    for (int i = 0; i < depth; ++i) message = Proto().Add(1, message);
    Input input(message.bytes());
    int reached = 0;
    for (WireField field; input.wire().Next(&field); ++reached) {
      WireReader::Scope scope{};
      if (!input.wire().Enter("a message", &scope)) break;
    }
    return std::pair(reached, input.in().ok());
  };
  EXPECT_EQ(depth_reached(100), std::pair(100, true));
  EXPECT_EQ(depth_reached(101), std::pair(100, false));
}

TEST(WireReaderTest, AMessageCanBeReadAgain) {
  Input input(Proto().Add(1, Proto().Varint(2, 7).Varint(3, 8)).Varint(4, 9).bytes());
  WireReader& wire = input.wire();
  std::vector<uint32_t> seen;
  const auto note = [&](const WireField& field) {
    seen.push_back(field.number);
    return wire.Skip(field);
  };
  WireField field;
  WireReader::Scope scope{};
  ASSERT_TRUE(wire.Next(&field) && wire.Enter("m", &scope) && wire.Fields(note));
  wire.Again(scope);
  ASSERT_TRUE(wire.Fields(note) && wire.Leave(scope) && wire.Fields(note));
  EXPECT_THAT(seen, ElementsAre(2, 3, 2, 3, 4));
}

TEST(WireReaderTest, LengthsAreThoseThatProtobufReads) {
  EXPECT_THAT(Walk(Proto().Tag(1, 2).Raw(VarintBytes(uint64_t{1} << 40)).bytes()),
              HasSubstr("needs 1099511627776 bytes"));
  EXPECT_THAT(Walk(Proto().Tag(1, 2).Raw(VarintBytes(UINT64_MAX)).bytes()),
              HasSubstr("needs 18446744073709551615 bytes"));
  EXPECT_EQ(Walk(Proto().Tag(1, 2).Raw(std::string("\x81\x80\x80\x80\x00x", 6)).bytes()), "good");
  EXPECT_THAT(Walk(Proto().Tag(1, 2).Raw(std::string("\x81\x80\x80\x80\x80\x00x", 7)).bytes()),
              HasSubstr("more than 5 bytes"));
}

TEST(WireReaderTest, CountsTheNumbersOfAPackedRun) {
  uint64_t count = 99;
  ASSERT_TRUE(CountVarints("", &count));
  EXPECT_EQ(count, 0u);
  ASSERT_TRUE(CountVarints(VarintBytes(1) + VarintBytes(UINT64_MAX) + VarintBytes(300), &count));
  EXPECT_EQ(count, 3u);
  EXPECT_FALSE(CountVarints("\x01\x80", &count));
  EXPECT_FALSE(CountVarints(std::string(10, '\xff'), &count));
  EXPECT_FALSE(CountVarints(std::string(9, '\xff') + "\x02", &count));
  std::vector<uint64_t> values;
  Input input(Proto().Packed(1, {1, 300, UINT64_MAX}).bytes().substr(1));
  ASSERT_TRUE(input.wire().Varints("run", [&](uint64_t value) {
    values.push_back(value);
    return true;
  }));
  EXPECT_THAT(values, ElementsAre(1, 300, UINT64_MAX));
}

}  // namespace
}  // namespace modelhost
