#include "daemon/format/zip_directory.h"

#include <functional>
#include <string>

#include "daemon/format/torch_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::Le;
using testing::ZipBuilder;
using testing::ZipEntry;

std::span<const std::byte> ZipBytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

ZipBuilder GoodZip() {
  ZipBuilder zip;
  zip.Add("m/data.pkl", "a pickle");
  zip.Add("m/data/0", std::string(100, 'd'));
  zip.Add("m/data/1", "");
  zip.Add("m/version", "3\n");
  return zip;
}

std::string ZipRefusal(const std::string& bytes) {
  auto zip = ZipDirectory::Read("x.pt", ZipBytes(bytes));
  if (zip.ok()) return "accepted";
  EXPECT_THAT(std::string(zip.status().message()), HasSubstr("x.pt: at byte "));
  return std::string(zip.status().message());
}

// A good archive after `change`.
std::string RefusalAfter(const std::function<void(ZipBuilder&)>& change) {
  ZipBuilder zip = GoodZip();
  change(zip);
  return ZipRefusal(zip.Build());
}

std::string Zip64Field(const std::string& value) {
  return Le<uint16_t>(1) + Le(static_cast<uint16_t>(value.size())) + value;
}

// All numbers of a member in ZIP64 fields, as torch does above 4 GiB.
void MakeWide(ZipEntry& entry) {
  entry.extra = Zip64Field(Le(entry.bytes) + Le(entry.stored));
  entry.descriptor = Le(0x08074b50u) + Le(entry.crc) + Le(entry.stored) + Le(entry.bytes);
}

// The directory's 32-bit sizes become "see the ZIP64 field".
std::string WithNarrowSizes(std::string bytes, const std::string& name) {
  const size_t at = bytes.find(name, bytes.find("PK\x01\x02")) - 46;
  bytes.replace(at + 20, 8, 8, '\xff');
  return bytes;
}

TEST(ZipDirectoryTest, StartsComeFromTheLocalHeaders) {
  for (const uint64_t alignment : {0, 1, 64, 4096}) {
    for (const bool zip64 : {false, true}) {
      ZipBuilder builder = GoodZip();
      builder.alignment = alignment;
      builder.zip64_end = zip64;
      const std::string bytes = builder.Build();
      auto zip = ZipDirectory::Read("x.pt", ZipBytes(bytes));
      ASSERT_TRUE(zip.ok()) << zip.status();
      ASSERT_EQ(zip->members().size(), 4u);
      for (size_t i = 0; i < 4; ++i) {
        const ZipMember& member = zip->members()[i];
        const ZipEntry& entry = builder.At(i);
        EXPECT_EQ(member.name, entry.name);
        EXPECT_EQ(bytes.substr(member.data_at, member.bytes), entry.data);
        EXPECT_EQ(StoredBytes(ZipBytes(bytes), member).size(), entry.data.size());
        EXPECT_FALSE(member.deflated);
        EXPECT_TRUE(HasGoodCrc(ZipBytes(bytes), member));
        if (alignment != 0) {
          EXPECT_EQ(member.data_at % alignment, 0u);
        }
      }
    }
  }
}

TEST(ZipDirectoryTest, AWrongCrcIsSeenByWhoAsks) {
  ZipBuilder builder = GoodZip();
  builder.At(0).data = "a pickly";
  const std::string bytes = builder.Build();
  auto zip = ZipDirectory::Read("x.pt", ZipBytes(bytes));
  ASSERT_TRUE(zip.ok()) << zip.status();
  EXPECT_FALSE(HasGoodCrc(ZipBytes(bytes), zip->members()[0]));
  EXPECT_TRUE(HasGoodCrc(ZipBytes(bytes), zip->members()[1]));
}

TEST(ZipDirectoryTest, AnEmptyArchiveHasNoMembers) {
  for (const bool zip64 : {false, true}) {
    ZipBuilder builder;
    builder.zip64_end = zip64;
    const std::string bytes = builder.Build();
    auto zip = ZipDirectory::Read("x.pt", ZipBytes(bytes));
    ASSERT_TRUE(zip.ok()) << zip.status();
    EXPECT_TRUE(zip->members().empty());
  }
}

TEST(ZipDirectoryTest, MembersMayLieInAnyOrder) {
  ZipBuilder builder = GoodZip();
  std::string bytes = builder.Build();
  // The directory lists version first.
  const size_t directory = bytes.find("PK\x01\x02");
  const size_t last = bytes.rfind("PK\x01\x02");
  const size_t end = last + 46 + std::string("m/version").size();
  bytes = bytes.substr(0, directory) + bytes.substr(last, end - last) +
          bytes.substr(directory, last - directory) + bytes.substr(end);
  auto zip = ZipDirectory::Read("x.pt", ZipBytes(bytes));
  ASSERT_TRUE(zip.ok()) << zip.status();
  EXPECT_EQ(zip->members()[0].name, "m/version");
  EXPECT_EQ(bytes.substr(zip->members()[0].data_at, 2), "3\n");
  EXPECT_EQ(bytes.substr(zip->members()[1].data_at, 8), "a pickle");
}

TEST(ZipDirectoryTest, SizesMayStandInZip64Fields) {
  ZipBuilder builder = GoodZip();
  MakeWide(builder.At(1));
  // As torch: the local field has 8 bytes and the sizes beside it are 0.
  builder.At(1).local_extra = Zip64Field(Le<uint64_t>(0));
  const std::string bytes = WithNarrowSizes(builder.Build(), "m/data/0");
  auto zip = ZipDirectory::Read("x.pt", ZipBytes(bytes));
  ASSERT_TRUE(zip.ok()) << zip.status();
  EXPECT_EQ(zip->members()[1].bytes, 100u);
  EXPECT_EQ(bytes.substr(zip->members()[1].data_at, 100), std::string(100, 'd'));

  // Other writers put the sizes into the local field.
  for (const uint64_t local : {uint64_t{100}, uint64_t{0}}) {
    builder.At(1).local_extra = Zip64Field(Le(local) + Le(local));
    builder.At(1).local_bytes = builder.At(1).local_stored = 0xffffffff;
    const std::string wide = WithNarrowSizes(builder.Build(), "m/data/0");
    EXPECT_EQ(ZipRefusal(wide), "accepted");
  }
  builder.At(1).local_extra = Zip64Field(Le<uint64_t>(101) + Le<uint64_t>(100));
  EXPECT_THAT(ZipRefusal(WithNarrowSizes(builder.Build(), "m/data/0")),
              HasSubstr("has the size 101 in its local header, but 100 in the directory"));
  builder.At(1).local_extra = "";
  EXPECT_THAT(ZipRefusal(WithNarrowSizes(builder.Build(), "m/data/0")),
              HasSubstr("no ZIP64 field with its sizes in its local header"));
}

TEST(ZipDirectoryTest, RefusesDamagedZip64Fields) {
  ZipBuilder builder = GoodZip();
  EXPECT_THAT(ZipRefusal(WithNarrowSizes(builder.Build(), "m/data/0")),
              HasSubstr("member 'm/data/0' has no ZIP64 field with all the numbers"));
  builder.At(1).extra = Zip64Field(Le<uint64_t>(100));
  EXPECT_THAT(ZipRefusal(WithNarrowSizes(builder.Build(), "m/data/0")),
              HasSubstr("no ZIP64 field with all the numbers"));
  builder.At(1).extra = Zip64Field(Le<uint64_t>(100) + Le<uint64_t>(100)) + Zip64Field("");
  EXPECT_THAT(ZipRefusal(WithNarrowSizes(builder.Build(), "m/data/0")),
              HasSubstr("two ZIP64 fields"));
  for (const uint64_t size : {uint64_t{1} << 63, ~uint64_t{0}, uint64_t{1} << 32}) {
    builder.At(1).extra = Zip64Field(Le(size) + Le(size));
    EXPECT_THAT(ZipRefusal(WithNarrowSizes(builder.Build(), "m/data/0")),
                HasSubstr("bytes, but only 116 are there before what comes next"));
  }
  builder.At(1).extra = Le<uint16_t>(7) + Le<uint16_t>(9) + "short";
  EXPECT_THAT(ZipRefusal(builder.Build()), HasSubstr("a damaged extra field"));
}

TEST(ZipDirectoryTest, DescriptorsHave16Or24Bytes) {
  ZipBuilder builder = GoodZip();
  MakeWide(builder.At(0));
  builder.At(0).extra.clear();
  EXPECT_EQ(ZipRefusal(builder.Build()), "accepted");
  const std::string good = GoodZip().At(0).descriptor;
  for (const std::string& bad : {std::string(), good.substr(4), good + "x", good + good}) {
    EXPECT_THAT(RefusalAfter([&](ZipBuilder& zip) { zip.At(0).descriptor = bad; }),
                HasSubstr("bytes behind its data, where a descriptor has 16 or 24"));
  }
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] ^= 1;
    EXPECT_THAT(RefusalAfter([&](ZipBuilder& zip) { zip.At(0).descriptor = bad; }),
                HasSubstr("a descriptor that is not what the directory says"));
  }
}

TEST(ZipDirectoryTest, LocalHeadersSayWhatTheDirectorySays) {
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(0).local_name = "m/data.pkX"; }),
              HasSubstr("member 'm/data.pkl' is called 'm/data.pkX' in its local header"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).local_flags = 0x0809; }),
              HasSubstr("other flags or another method"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).local_flags = 0x0800; }),
              HasSubstr("other flags or another method"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).local_method = 8; }),
              HasSubstr("other flags or another method"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).local_crc = 1; }),
              HasSubstr("another CRC"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).local_bytes = 99; }),
              HasSubstr("the size 99 in its local header, but 100 in the directory"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).local_stored = 99; }),
              HasSubstr("the size 99 in its local header"));
  EXPECT_EQ(RefusalAfter([](ZipBuilder& zip) {
              ZipEntry& entry = zip.At(1);
              entry.local_crc = entry.crc;
              entry.local_bytes = entry.local_stored = 100;
            }),
            "accepted");
  // Without a descriptor nobody else has the numbers.
  const auto undescribed = [](ZipBuilder& zip) {
    ZipEntry& entry = zip.At(1);
    entry.flags = entry.local_flags = 0x0800;
    entry.descriptor.clear();
    entry.local_crc = entry.crc;
    entry.local_bytes = entry.local_stored = 100;
  };
  EXPECT_EQ(RefusalAfter(undescribed), "accepted");
  EXPECT_THAT(RefusalAfter([&](ZipBuilder& zip) { undescribed(zip), zip.At(1).local_crc = 0; }),
              HasSubstr("another CRC"));
  EXPECT_THAT(RefusalAfter([&](ZipBuilder& zip) { undescribed(zip), zip.At(1).local_bytes = 0; }),
              HasSubstr("the size 0 in its local header"));
}

TEST(ZipDirectoryTest, TheTimeIsTheSameInBothHeaders) {
  for (const uint32_t other : {1u, 0x10000u}) {
    EXPECT_THAT(RefusalAfter([&](ZipBuilder& zip) { zip.At(1).date = other; }),
                HasSubstr("'m/data/0' has another time in its local header"));
    EXPECT_EQ(RefusalAfter([&](ZipBuilder& zip) { zip.At(1).date = zip.At(1).local_date = other; }),
              "accepted");
  }
}

// Another reader would see the members that the hidden records tell of.
TEST(ZipDirectoryTest, NoZip64LocatorHidesInTheDirectory) {
  for (const bool record : {false, true}) {
    for (const bool comment : {false, true}) {
      ZipBuilder zip = GoodZip();
      zip.zip64_end = false;
      ZipEntry& last = zip.At(3);
      const std::string plain = zip.Build();
      const size_t at = plain.size() - 22 + (comment ? 0 : 4);
      std::string hidden;
      if (record) {
        hidden = Le(0x06064b50u) + Le<uint64_t>(44) + Le<uint16_t>(45) + Le<uint16_t>(45) +
                 Le<uint64_t>(0) + Le<uint64_t>(0) + Le<uint64_t>(0) + Le<uint64_t>(0) +
                 Le<uint64_t>(at);
      }
      hidden += Le(0x07064b50u) + Le(0u) + Le<uint64_t>(record ? at : plain.size()) + Le(1u);
      if (comment) {
        last.comment = hidden;
      } else {
        last.extra = "zz" + Le(static_cast<uint16_t>(hidden.size())) + hidden;
      }
      EXPECT_THAT(ZipRefusal(zip.Build()), AnyOf(HasSubstr("ZIP64 end record differ"),
                                                 HasSubstr("the ZIP64 locator points")))
          << record << comment;
    }
  }
}

TEST(ZipDirectoryTest, AMemberHasNoComment) {
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(2).comment = "x"; }),
              HasSubstr("member 'm/data/1' has a comment"));
}

TEST(ZipDirectoryTest, AMemberHasNoSecondNameInAnExtraField) {
  const std::string field = "up" + Le<uint16_t>(12) + "\x01" + Le(0u) + "m/other";
  EXPECT_THAT(RefusalAfter([&](ZipBuilder& zip) { zip.At(1).extra = field; }),
              HasSubstr("member 'm/data/0' has a second name"));
  EXPECT_THAT(RefusalAfter([&](ZipBuilder& zip) { zip.At(1).local_extra = field; }),
              HasSubstr("member 'm/data/0' has a second name"));
}

TEST(ZipDirectoryTest, EveryByteBelongsToSomething) {
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.tail = "x"; }),
              HasSubstr("no end record of a ZIP archive in the last 22 bytes"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.comment = "a comment"; }),
              HasSubstr("no end record of a ZIP archive in the last 22 bytes"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(0).before = "#!/bin/sh\n"; }),
              HasSubstr("'m/data.pkl' has its header at byte 10: an overlap, or bytes"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).before = "x"; }),
              HasSubstr("17 bytes behind its data"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(3).before = std::string(100, 'x'); }),
              HasSubstr("'m/version' has its header at byte"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.before_directory = "x"; }),
              HasSubstr("17 bytes behind its data"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) {
                zip.Add("m/empty", "");
                zip.before_directory = "x";
              }),
              HasSubstr("belong to no member in front of the central directory"));
  // What was moved to make room for something in front is moved in the file only.
  EXPECT_THAT(ZipRefusal("prefix" + GoodZip().Build()), AnyOf(HasSubstr("ZIP64 locator points")));
  ZipBuilder plain = GoodZip();
  plain.zip64_end = false;
  EXPECT_THAT(ZipRefusal("prefix" + plain.Build()),
              HasSubstr("does not end where the end record starts"));
}

TEST(ZipDirectoryTest, MembersDoNotOverlap) {
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).header_error = -64; }),
              AnyOf(HasSubstr("overlap"), HasSubstr("no local header"),
                    HasSubstr("before what comes next")));
  // Two names for one local header.
  ZipBuilder twice = GoodZip();
  ZipBuilder again = GoodZip();
  const std::string whole = twice.Build();
  auto zip = ZipDirectory::Read("x.pt", ZipBytes(whole));
  ASSERT_TRUE(zip.ok());
  const int64_t distance = static_cast<int64_t>(whole.find("PK\x03\x04", 1));
  again.At(1).header_error = -distance;
  EXPECT_THAT(ZipRefusal(again.Build()),
              AnyOf(HasSubstr("before what comes next"), HasSubstr("is called 'm/data.pkl'")));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& b) { b.At(1).bytes = b.At(1).stored = 200; }),
              HasSubstr("needs 200 bytes, but only 116 are there"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& b) { b.At(1).header_error = int64_t{1} << 30; }),
              HasSubstr("bytes"));
}

TEST(ZipDirectoryTest, AMemberHasOneName) {
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.Add("m/data.pkl", "other"); }),
              HasSubstr("duplicate member: 'm/data.pkl' and 'm/data.pkl'"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.Add("m/Data.PKL", "other"); }),
              HasSubstr("duplicate member: 'm/data.pkl' and 'm/Data.PKL'"));
}

TEST(ZipDirectoryTest, NamesArePlain) {
  for (const std::string& name :
       {std::string("/etc/x"), std::string("m/../x"), std::string("m\\x"), std::string("m/x\0y", 5),
        std::string("m//x"), std::string(), std::string("m/\xff"), std::string("./x")}) {
    EXPECT_THAT(RefusalAfter([&](ZipBuilder& zip) { zip.Add(name, "x"); }),
                HasSubstr("has no plain relative name"));
  }
  EXPECT_EQ(RefusalAfter([](ZipBuilder& zip) { zip.Add("m/folder/", ""); }), "accepted");
  EXPECT_EQ(RefusalAfter([](ZipBuilder& zip) { zip.Add("m/\xd1\x8f", ""); }), "accepted");
}

TEST(ZipDirectoryTest, FlagsAndMethodsAreThoseOfPlainMembers) {
  const auto with_flags = [](uint16_t flags) {
    return RefusalAfter([flags](ZipBuilder& zip) {
      zip.At(1).flags = zip.At(1).local_flags = static_cast<uint16_t>(0x0808 | flags);
    });
  };
  for (int bit = 0; bit < 16; ++bit) {
    const bool fine = bit == 1 || bit == 2 || bit == 3 || bit == 11;
    const char* why = bit == 0 || bit == 6 || bit == 13 ? "is encrypted"
                      : bit == 5                        ? "is patched"
                                                        : "unknown flags";
    EXPECT_THAT(with_flags(static_cast<uint16_t>(1 << bit)), HasSubstr(fine ? "accepted" : why));
  }
  const auto with_method = [](uint16_t method) {
    return RefusalAfter(
        [method](ZipBuilder& zip) { zip.At(1).method = zip.At(1).local_method = method; });
  };
  EXPECT_EQ(with_method(8), "accepted");
  for (const uint16_t method : {1, 9, 12, 14, 93, 95, 99}) {
    EXPECT_THAT(with_method(method), HasSubstr("the unknown method"));
  }
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).bytes = 99; }),
              HasSubstr("is stored, but has the sizes 100 and 99"));
  EXPECT_THAT(RefusalAfter([](ZipBuilder& zip) { zip.At(1).disk = 1; }),
              HasSubstr("in another file of a set"));
}

TEST(ZipDirectoryTest, TheEndRecordsAgree) {
  for (const bool zip64 : {false, true}) {
    for (const int64_t error : {-1, 1, 100, -100}) {
      const auto broken = [&](const std::function<void(ZipBuilder&)>& change) {
        return RefusalAfter([&](ZipBuilder& zip) {
          zip.zip64_end = zip64;
          change(zip);
        });
      };
      EXPECT_NE(broken([&](ZipBuilder& zip) { zip.directory_at_error = error; }), "accepted");
      EXPECT_NE(broken([&](ZipBuilder& zip) { zip.directory_size_error = error; }), "accepted");
      EXPECT_NE(broken([&](ZipBuilder& zip) { zip.count_error = static_cast<int>(error); }),
                "accepted");
    }
  }
  // Each byte of the three end records counts, but for the two versions.
  const std::string good = GoodZip().Build();
  const size_t end64 = good.size() - 22 - 20 - 56;
  for (size_t i = end64; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] ^= 1;
    const bool version = i >= end64 + 12 && i < end64 + 16;
    const bool disks = i == good.size() - 22 - 4;  // 0 for 1 disk in all.
    EXPECT_EQ(ZipRefusal(bad) == "accepted", version || disks) << i - end64;
  }
}

TEST(ZipDirectoryTest, HugeCountsAreNotBelieved) {
  ZipBuilder zip = GoodZip();
  zip.count_error = 2'000'000'000;
  EXPECT_THAT(ZipRefusal(zip.Build()), HasSubstr("cannot have 2000000004 members"));
}

TEST(ZipDirectoryTest, EveryCutIsRefused) {
  for (const bool zip64 : {false, true}) {
    ZipBuilder builder = GoodZip();
    builder.zip64_end = zip64;
    const std::string good = builder.Build();
    ASSERT_EQ(ZipRefusal(good), "accepted");
    for (size_t size = 0; size < good.size(); ++size) {
      EXPECT_NE(ZipRefusal(good.substr(0, size)), "accepted") << size;
      EXPECT_NE(ZipRefusal(good.substr(good.size() - size)), "accepted") << size;
    }
  }
}

}  // namespace
}  // namespace modelhost
