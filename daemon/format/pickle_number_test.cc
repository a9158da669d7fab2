#include "daemon/format/pickle_number.h"

#include <string>

#include "gtest/gtest.h"

namespace modelhost {
namespace {

TEST(PickleNumberTest, SignBytesThatSayNothingAreTrimmed) {
  using std::string;
  EXPECT_EQ(TrimSignBytes(""), "");
  EXPECT_EQ(TrimSignBytes(string("\0\0\0", 3)), "");
  EXPECT_EQ(TrimSignBytes("\xff\xff\xff"), "\xff");
  EXPECT_EQ(TrimSignBytes(string("\x7f\0\0", 3)), "\x7f");
  EXPECT_EQ(TrimSignBytes(string("\x80\0\0", 3)), string("\x80\0", 2));
  EXPECT_EQ(TrimSignBytes("\x80\xff\xff"), "\x80");
  EXPECT_EQ(TrimSignBytes("\x7f\xff\xff"), "\x7f\xff");
  EXPECT_EQ(TrimSignBytes(string("\0\x01", 2)), string("\0\x01", 2));
}

TEST(PickleNumberTest, DigitsAreThoseOfPython) {
  using std::string;
  EXPECT_EQ(DecimalDigits(""), "0");
  EXPECT_EQ(DecimalDigits(string(3, '\0')), "0");
  EXPECT_EQ(DecimalDigits("\x7f"), "127");
  EXPECT_EQ(DecimalDigits("\x80"), "-128");
  EXPECT_EQ(DecimalDigits("\xff"), "-1");
  EXPECT_EQ(DecimalDigits(string("\0\xff", 2)), "-256");
  EXPECT_EQ(DecimalDigits(string(8, '\xff') + '\0'), "18446744073709551615");
  EXPECT_EQ(DecimalDigits(string(8, '\0') + '\x40'), "1180591620717411303424");   // 2^70.
  EXPECT_EQ(DecimalDigits(string(8, '\0') + '\xc0'), "-1180591620717411303424");  // -2^70.
  const string longest = DecimalDigits(string(254, '\xff') + '\x7f');             // 2^2039 - 1.
  EXPECT_EQ(longest.size(), 614u);
  EXPECT_EQ(longest.substr(0, 10), "6311915248");
  EXPECT_EQ(longest.substr(604), "4100773887");
}

}  // namespace
}  // namespace modelhost
