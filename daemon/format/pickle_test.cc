#include "daemon/format/pickle.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/pickle_opcodes.h"
#include "daemon/format/torch_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Le;
namespace pk = testing::pickled;

// What is read refers to the stream.
absl::StatusOr<Pickle> Read(const std::string& stream) {
  return Pickle::Read("x.pt: m/data.pkl", std::as_bytes(std::span<const char>(stream)));
}
absl::StatusOr<Pickle> Read(std::string&& stream) = delete;

std::string PickleRefusal(const std::string& stream) {
  auto pickle = Read(stream);
  if (pickle.ok()) return "accepted";
  EXPECT_TRUE(absl::IsInvalidArgument(pickle.status()) || absl::IsUnimplemented(pickle.status()));
  EXPECT_THAT(std::string(pickle.status().message()), HasSubstr("x.pt: m/data.pkl: "));
  return std::string(pickle.status().message());
}
// Of a protocol 2 stream with one value.
std::string RefusalOfValue(const std::string& value) { return PickleRefusal(pk::Whole(value)); }

// A value as text; what is below a few levels is left out.
std::string Shown(const Pickle& pickle, const PickleValue& value, int depth = 0) {
  const auto items = [&](const char* open, const char* close) {
    std::string out = open;
    Pickle::Cursor cursor(pickle, value);
    while (const PickleValue* item = depth > 8 ? nullptr : cursor.Next()) {
      absl::StrAppend(&out, out.size() > 1 ? " " : "", Shown(pickle, *item, depth + 1));
    }
    return out + close;
  };
  switch (value.kind) {
    case PickleKind::kNone:
      return "None";
    case PickleKind::kBool:
      return value.bits == 0 ? "False" : "True";
    case PickleKind::kInt:
      return absl::StrCat(value.AsInt());
    case PickleKind::kLongInt:
      return absl::StrCat("long", value.size);
    case PickleKind::kFloat:
      return "float";
    case PickleKind::kText:
      return absl::StrCat("'", std::string(pickle.Text(value)), "'");
    case PickleKind::kOpaque:
      return "opaque";
    case PickleKind::kGlobal:
      return "global";
    case PickleKind::kTuple:
      return items("(", ")");
    case PickleKind::kList:
      return items("[", "]");
    case PickleKind::kDict:
      return items("{", "}");
    case PickleKind::kStorage:
      return absl::StrCat("storage", value.bits);
    case PickleKind::kTensor:
      return absl::StrCat("tensor", value.bits);
    case PickleKind::kMark:
      return "mark";
  }
  return "?";
}

std::string ValueOf(const std::string& stream) {
  auto pickle = Read(stream);
  return pickle.ok() ? Shown(*pickle, pickle->root()) : std::string(pickle.status().message());
}
std::string ValueOfWhole(const std::string& value) { return ValueOf(pk::Whole(value)); }

TEST(PickleTest, ReadsPlainValues) {
  EXPECT_EQ(ValueOfWhole("N"), "None");
  EXPECT_EQ(ValueOfWhole("\x88"), "True");
  EXPECT_EQ(ValueOfWhole("\x89"), "False");
  EXPECT_EQ(ValueOfWhole("K\xff"), "255");
  EXPECT_EQ(ValueOfWhole("M\xff\xff"), "65535");
  EXPECT_EQ(ValueOfWhole("J\xfb\xff\xff\xff"), "-5");
  EXPECT_EQ(ValueOfWhole(std::string("\x8a\x00", 2)), "0");
  EXPECT_EQ(ValueOfWhole("\x8a\x01\xff"), "-1");
  EXPECT_EQ(ValueOfWhole(std::string("\x8a\x02\xff\x00", 4)), "255");
  EXPECT_EQ(ValueOfWhole("\x8a\x08" + Le(INT64_MIN)), "-9223372036854775808");
  EXPECT_EQ(ValueOfWhole("\x8a\x09" + std::string(9, '\x01')), "long9");
  // Bytes that repeat the sign say nothing.
  EXPECT_EQ(ValueOfWhole("\x8a\x0c" + std::string(10, '\x01') + std::string(2, '\0')), "long10");
  EXPECT_EQ(ValueOfWhole("\x8a\x09\x04" + std::string(8, '\0')), "4");
  EXPECT_EQ(ValueOfWhole("\x8a\x20" + std::string(32, '\xff')), "-1");
  EXPECT_EQ(ValueOfWhole("\x8a\x09" + Le(uint64_t{1} << 63) + '\0'), "long9");
  EXPECT_EQ(ValueOfWhole("G12345678"), "float");
  EXPECT_EQ(ValueOfWhole(pk::Text("a\xc3\xa9")), "'a\xc3\xa9'");
  EXPECT_EQ(ValueOfWhole(pk::Text("\xed\xa0\x80")), "'\xed\xa0\x80'");  // A lone surrogate.
  EXPECT_EQ(ValueOfWhole("U\x01\xff"), "'\xff'");
}

TEST(PickleTest, ReadsContainers) {
  EXPECT_EQ(ValueOfWhole(")"), "()");
  EXPECT_EQ(ValueOfWhole("K\x01\x85"), "(1)");
  EXPECT_EQ(ValueOfWhole("K\x01K\x02\x86"), "(1 2)");
  EXPECT_EQ(ValueOfWhole("K\x01K\x02K\x03\x87"), "(1 2 3)");
  EXPECT_EQ(ValueOfWhole("(K\x01K\x02K\x03K\x04t"), "(1 2 3 4)");
  EXPECT_EQ(ValueOfWhole("(t"), "()");
  EXPECT_EQ(ValueOfWhole("]"), "[]");
  EXPECT_EQ(ValueOfWhole("]K\x01"
                         "a"),
            "[1]");
  EXPECT_EQ(ValueOfWhole("](K\x01K\x02"
                         "eK\x03"
                         "a(K\x04"
                         "e(e"),
            "[1 2 3 4]");
  EXPECT_EQ(ValueOfWhole("}"), "{}");
  EXPECT_EQ(ValueOfWhole("}K\x01K\x02s(K\x03K\x04u(u"), "{1 2 3 4}");
  // Items that other values were put between.
  EXPECT_EQ(ValueOfWhole("](K\x01"
                         "e(](K\x02"
                         "e)e"),
            "[1 [2] ()]");
  EXPECT_EQ(ValueOfWhole("]q\x01K\x07"
                         "a]K\x01"
                         "ah\x01K\x08"
                         "a\x87"),
            "([7 8] [1] [7 8])");
}

TEST(PickleTest, TheMemoIsWhatWasPut) {
  EXPECT_EQ(ValueOfWhole(std::string("K\x05q\x00h\x00\x86", 7)), "(5 5)");
  EXPECT_EQ(ValueOfWhole("K\x05q\xc8h\xc8\x86"), "(5 5)");
  EXPECT_EQ(ValueOfWhole("K\x05r\xff\xff\xff\xffj\xff\xff\xff\xff\x86"), "(5 5)");
  // A slot that is set twice has the last value.
  EXPECT_EQ(ValueOfWhole(std::string("K\x05q\x00K\x06q\x00h\x00\x87", 11)), "(5 6 6)");
  EXPECT_EQ(ValueOfWhole(std::string("(K\x05q\x01K\x06q\x00K\x07q\x01h\x01t", 16)), "(5 6 7 7)");
  // A list that grows after it was put.
  EXPECT_EQ(ValueOfWhole("](]q\x01"
                         "h\x01(K\x01"
                         "ee"),
            "[[1] [1]]");
  EXPECT_THAT(RefusalOfValue("h\x05"), HasSubstr("at byte 2: BINGET: memo slot 5 is not set"));
  EXPECT_THAT(RefusalOfValue("j\x05\x01\x01\x01"), HasSubstr("LONG_BINGET: memo slot 16843013"));
}

TEST(PickleTest, Protocols4And5AreReadWhereTheyMeanTheSame) {
  EXPECT_EQ(ValueOf("\x80\x04\x95" + Le<uint64_t>(5) +
                    "\x8c\x01"
                    "a\x94."),
            "'a'");
  EXPECT_EQ(ValueOf("\x80\x05\x8c\x01"
                    "a\x94\x94h\x01\x86."),
            "('a' 'a')");
  EXPECT_EQ(ValueOf("\x80\x04\x8f(K\x01\x90."), "[1]");
  EXPECT_EQ(ValueOf("\x80\x04\x8c\x0b"
                    "collections\x8c\x0bOrderedDict\x93)R."),
            "{}");
  EXPECT_EQ(ValueOf("\x80\x04"
                    "C\x01zB\x01" +
                    std::string(3, '\0') + "y\x86."),
            "('z' 'y')");
  EXPECT_THAT(PickleRefusal("\x80\x04\x95" + Le<uint64_t>(6) +
                            "\x8c\x01"
                            "a\x94."),
              HasSubstr("FRAME: a frame of 6 bytes, with 5 left"));
  EXPECT_THAT(PickleRefusal("\x80\x04NK\x01\x93."), HasSubstr("STACK_GLOBAL: a module and a name"));
  EXPECT_THAT(PickleRefusal("\x80\x06N."), HasSubstr("PROTO: protocol 6; 2 to 5 are read"));
  EXPECT_THAT(PickleRefusal(std::string("\x80\x00N.", 4)), HasSubstr("protocol 0"));
}

TEST(PickleTest, EveryOtherOpcodeIsRefusedByName) {
  const std::string known(
      "\x80\x95.(N\x88\x89JKM\x8aGUCB\x8cX)\x85\x86\x87t]\x8f}ae\x90suhjqr"
      "\x94"
      "c\x93R\x81"
      "bQ");
  for (int op = 0; op < 256; ++op) {
    const bool read = known.find(static_cast<char>(op)) != std::string::npos;
    const std::string refusal =
        PickleRefusal(std::string("\x80\x02") + static_cast<char>(op) + std::string(20, '\x01'));
    const bool refused = refusal.find("at byte 2: ") != std::string::npos &&
                         refusal.find("this opcode is not read") != std::string::npos;
    EXPECT_NE(refused, read) << op << refusal;
    if (!read) {
      EXPECT_THAT(refusal, HasSubstr(std::string("at byte 2: ") +
                                     std::string(PickleOpcodeName(static_cast<uint8_t>(op)))));
    }
  }
  EXPECT_THAT(RefusalOfValue("(i__builtin__\nset\n"), HasSubstr("at byte 3: INST: "));
  EXPECT_THAT(RefusalOfValue("P1\n"), HasSubstr("PERSID"));
  EXPECT_THAT(RefusalOfValue("\x82\x01"), HasSubstr("EXT1"));
}

TEST(PickleTest, TheStackIsNeverLeft) {
  for (const char* op : {"\x85", "\x86", "\x87", "a", "s", "R", "\x81", "b", "Q", "q\x01", "t", "e",
                         "u", "\x93", "\x94", "\x90"}) {
    EXPECT_NE(RefusalOfValue(op), "accepted") << op;
    // A tuple may be empty.
    EXPECT_EQ(RefusalOfValue(std::string("(") + op) == "accepted", *op == 't') << op;
    // What lies in front of a mark is out of reach.
    EXPECT_NE(RefusalOfValue(std::string("NNNNN(") + op), "accepted") << op;
  }
  EXPECT_THAT(RefusalOfValue("\x87"),
              HasSubstr("TUPLE3: needs 3 values on the stack, which has 0"));
  EXPECT_THAT(RefusalOfValue("NN(N\x86"),
              HasSubstr("TUPLE2: needs 2 values on the stack, which has 1"));
  EXPECT_THAT(RefusalOfValue("t"), HasSubstr("TUPLE: no mark on the stack"));
  EXPECT_THAT(RefusalOfValue("(e"), HasSubstr("APPENDS: no container in front of the mark"));
  EXPECT_THAT(RefusalOfValue("((e"), HasSubstr("APPENDS: what gets the items is no list"));
  EXPECT_THAT(RefusalOfValue("}(K\x01u"), HasSubstr("an odd number of keys and values: 1"));
  EXPECT_THAT(RefusalOfValue("](K\x01K\x02u"),
              HasSubstr("SETITEMS: what gets the items is no dict"));
  EXPECT_THAT(RefusalOfValue("}K\x01"
                             "a"),
              HasSubstr("APPEND: what gets the items is no list"));
  EXPECT_THAT(RefusalOfValue("NN"), HasSubstr("STOP: 2 values on the stack instead of one"));
  EXPECT_THAT(RefusalOfValue("(N"), HasSubstr("STOP: 2 values"));
  EXPECT_THAT(RefusalOfValue(""), HasSubstr("STOP: 0 values"));
  EXPECT_THAT(PickleRefusal(pk::Whole("N") + "junk"), HasSubstr("STOP: 4 bytes behind the end"));
  EXPECT_THAT(PickleRefusal("N\x80\x02."), HasSubstr("PROTO: not at the start"));
  EXPECT_THAT(PickleRefusal(""), HasSubstr("the pickle is empty"));
  EXPECT_THAT(PickleRefusal(std::string("\x80\x02") + std::string(1'000'001, 'N') + "."),
              HasSubstr("more than 1000000 values on the stack"));
  EXPECT_THAT(PickleRefusal(std::string(100'000'001, 'N')), HasSubstr("the limit is 100000000"));
}

TEST(PickleTest, TextsLieInTheStreamAndAreUtf8) {
  EXPECT_THAT(RefusalOfValue("X\xff\xff\xff\x7f"
                             "abc"),
              HasSubstr("a text needs 2147483647 bytes, but only 4 are left"));
  EXPECT_THAT(RefusalOfValue("X\xff\xff\xff\xff"
                             "abc"),
              HasSubstr("a text needs 4294967295 bytes"));
  EXPECT_THAT(RefusalOfValue("U\x09"
                             "abc"),
              HasSubstr("a text needs 9 bytes"));
  EXPECT_THAT(RefusalOfValue("\x8a\xff"
                             "abc"),
              HasSubstr("a number needs 255 bytes"));
  EXPECT_THAT(RefusalOfValue(pk::Text("a\xff")), HasSubstr("a text that is not UTF-8"));
  EXPECT_THAT(PickleRefusal("\x80\x02"
                            "cabc"),
              HasSubstr("ends inside the name of a module"));
  EXPECT_THAT(PickleRefusal("\x80\x02"
                            "cabc\nd"),
              HasSubstr("ends inside a name"));
}

TEST(PickleTest, OnlyListedGlobalsAreKnown) {
  for (const auto& [module, name] : std::vector<std::pair<std::string, std::string>>{
           {"os", "system"},
           {"posix", "getpid"},
           {"nt", "getpid"},
           {"builtins", "eval"},
           {"__builtin__", "getattr"},
           {"torch", "load"},
           {"torch.serialization", "load"},
           {"torch._utils", "_rebuild_tensor_v2x"},
           {"torch._utils", "_rebuild_tensor_"},
           {"torch._utils._rebuild_tensor_v2", ""},
           {"torch", "_utils._rebuild_tensor_v2"},
           {"collections", "OrderedDict.fromkeys"},
           {"collections", "ordereddict"},
           {"asyncio.unix_events", "_UnixSubprocessTransport._start"},
           {"torch", "float7_e9m9"},
           {"torch.storage", "_load_from_bytes"},
           {"numpy.core.multiarray", "_reconstruct"},
           {"e3nn.o3._irreps", "Irreps"},
           {"", ""}}) {
    EXPECT_THAT(RefusalOfValue(pk::Global(module, name)),
                HasSubstr("GLOBAL: the global '" + module + "." + name + "' is not one"));
  }
  EXPECT_EQ(ValueOfWhole(pk::Global("__builtin__", "set") + ")R"), "[]");
  EXPECT_EQ(ValueOfWhole(pk::Global("torch", "float32")), "global");
  EXPECT_EQ(ValueOfWhole(pk::Global("torch", "per_tensor_affine")), "global");
}

TEST(PickleTest, WhatMayBeCalledGivesItsValue) {
  EXPECT_EQ(ValueOfWhole(pk::NoHooks()), "{}");
  EXPECT_EQ(ValueOfWhole(pk::NoHooks() + "K\x01K\x02s"), "{1 2}");
  EXPECT_EQ(ValueOfWhole(pk::Global("collections", "OrderedDict") + ")\x81"), "{}");
  const std::string pairs = pk::List({pk::List({pk::Text("a"), "K\x01"}), pk::Ints({2, 3})});
  EXPECT_EQ(ValueOfWhole(pk::Call("collections", "OrderedDict", {pairs})), "{'a' 1 2 3}");
  EXPECT_EQ(ValueOfWhole(pk::Call("collections", "Counter", {"}K\x01K\x02s"}) + "K\x03K\x04s"),
            "{1 2 3 4}");
  EXPECT_EQ(ValueOfWhole(pk::Call("builtins", "set",
                                  {"](K\x01K\x02"
                                   "e"})),
            "[1 2]");
  EXPECT_EQ(ValueOfWhole(pk::Call("torch", "Size", {pk::Ints({4, 5})})), "(4 5)");
  EXPECT_EQ(ValueOfWhole(pk::Call("torch", "device", {pk::Text("cuda"), "K\x01"})), "opaque");
  EXPECT_EQ(ValueOfWhole(pk::Call("_codecs", "encode", {pk::Text("a"), pk::Text("latin1")})),
            "opaque");
  EXPECT_EQ(ValueOfWhole(pk::Call("torch.serialization", "_get_layout", {pk::Text("x")})),
            "opaque");
  // The versions that a state_dict carries.
  EXPECT_EQ(ValueOfWhole(pk::NoHooks() + pk::Dict({{pk::Text("_metadata"), pk::NoHooks()}}) + "b"),
            "{}");
}

TEST(PickleTest, OtherCallsAreRefused) {
  EXPECT_THAT(RefusalOfValue(pk::Text("a") + ")R"),
              HasSubstr("REDUCE: what is called is no global"));
  EXPECT_THAT(RefusalOfValue(pk::Global("torch", "device") + "NR"),
              HasSubstr("the arguments are no tuple"));
  EXPECT_THAT(RefusalOfValue(pk::Call("torch", "float32", {})),
              HasSubstr("torch.float32 is not called in a checkpoint"));
  EXPECT_THAT(RefusalOfValue(pk::Call("torch", "FloatStorage", {})), HasSubstr("is not called"));
  EXPECT_THAT(RefusalOfValue(pk::Call("torch", "Tensor", {})), HasSubstr("is not called"));
  EXPECT_THAT(RefusalOfValue(pk::Global("torch", "device") + ")\x81"),
              HasSubstr("NEWOBJ: torch.device cannot be made by NEWOBJ"));
  EXPECT_THAT(RefusalOfValue("}}b"), HasSubstr("BUILD: only an OrderedDict may have attributes"));
  EXPECT_THAT(RefusalOfValue(pk::NoHooks() + "Nb"), HasSubstr("the attributes are no dict"));
  EXPECT_THAT(RefusalOfValue(pk::Call("collections", "OrderedDict", {"N", "N"})),
              HasSubstr("collections.OrderedDict has 2 arguments"));
  EXPECT_THAT(RefusalOfValue(pk::Call("collections", "OrderedDict", {"N"})),
              HasSubstr("needs a dict"));
  EXPECT_THAT(RefusalOfValue(pk::Call("collections", "OrderedDict",
                                      {"]N"
                                       "a"})),
              HasSubstr("needs pairs"));
  EXPECT_THAT(RefusalOfValue(pk::Call("collections", "OrderedDict",
                                      {"]NNN\x87"
                                       "a"})),
              HasSubstr("needs pairs"));
  EXPECT_THAT(RefusalOfValue(pk::Call("torch", "Size", {"N"})), HasSubstr("needs a tuple"));
  for (const char* name : {"_rebuild_qtensor", "_rebuild_sparse_tensor",
                           "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass"}) {
    EXPECT_THAT(
        RefusalOfValue(pk::Call("torch._utils", name, {})),
        HasSubstr(std::string("torch._utils.") + name + " makes a tensor that is no plain"));
  }
}

// Each copy of the 1000 items costs a few bytes of the stream only.
TEST(PickleTest, CopiesAreBoundedByTheStream) {
  std::string items;
  for (int i = 0; i < 1000; ++i) items += "N";
  std::string stream = "]q\x01(" + items + "e0";
  stream = "](" + std::string("]q\x01(") + items + "e";
  for (int i = 0; i < 50; ++i) stream += pk::Call("builtins", "set", {"h\x01"});
  EXPECT_THAT(RefusalOfValue(stream + "e"),
              HasSubstr("copies more items than the pickle has bytes"));
}

TEST(PickleTest, OnePersistentIdIsOneStorage) {
  const std::string id = pk::Tuple({pk::Text("storage"), pk::Global("torch", "FloatStorage"),
                                    pk::Text("0"), pk::Text("cpu"), pk::Int(4)});
  const std::string stream = pk::Whole("](" + id + "q\x01Qh\x01Qh\x01Q" + id + "Qe");
  auto pickle = Read(stream);
  ASSERT_TRUE(pickle.ok()) << pickle.status();
  EXPECT_EQ(pickle->storages().size(), 2u);
  EXPECT_EQ(Shown(*pickle, pickle->root()), "[storage0 storage0 storage0 storage1]");
  // Other words about the same key are another storage, for the reader to compare.
  const std::string key = pk::Text("0") + "q\x01";
  const auto other = [](const std::string& name, int64_t count, const std::string& text) {
    return pk::Tuple({pk::Text("storage"), pk::Global("torch", name), text, pk::Text("cpu"),
                      pk::Int(count)}) +
           "Q";
  };
  EXPECT_EQ(ValueOfWhole("](" + other("FloatStorage", 4, key) + other("IntStorage", 4, "h\x01") +
                         other("IntStorage", 3, "h\x01") + other("IntStorage", 3, "h\x01") + "e"),
            "[storage0 storage1 storage2 storage2]");
}

// 48 MiB are free; each of these would take 16 bytes and more per byte.
TEST(PickleTest, ValuesAreBoundedByTheStream) {
  constexpr size_t kMany = 6'000'000;
  const auto repeat = [](const std::string& what) {
    std::string out = std::string("]");
    for (size_t i = 0; i < kMany / what.size(); ++i) out += what;
    return out;
  };
  for (const std::string& what : {std::string("]a"), std::string("N\x85\x85") + "a"}) {
    EXPECT_THAT(RefusalOfValue(repeat(what).substr(0, kMany)), HasSubstr("more values than"))
        << what;
  }
  std::string sparse;
  for (uint32_t i = 0; i < 1'500'000; ++i) sparse += "r" + Le(i + 7);
  EXPECT_THAT(RefusalOfValue("N" + sparse), HasSubstr("more values than"));
  // Texts are not kept.
  EXPECT_EQ(RefusalOfValue(pk::Text(std::string(kMany, 'x'))), "accepted");
}

TEST(PickleTest, StoragesAndTensors) {
  const std::string stream =
      pk::Whole(pk::View(pk::Storage("HalfStorage", "7", 12), 3, {2, 4}, {4, 1}));
  auto pickle = Read(stream);
  ASSERT_TRUE(pickle.ok()) << pickle.status();
  EXPECT_EQ(pickle->root().kind, PickleKind::kTensor);
  ASSERT_EQ(pickle->storages().size(), 1u);
  EXPECT_EQ(pickle->Text(pickle->storages()[0].key), "7");
  EXPECT_EQ(pickle->storages()[0].count, 12u);
  EXPECT_EQ(pickle->storages()[0].type->dtype, abi::DType::kF16);
  ASSERT_EQ(pickle->tensors().size(), 1u);
  const PickleTensor& tensor = pickle->tensors()[0];
  EXPECT_EQ(tensor.dtype, abi::DType::kF16);
  EXPECT_EQ(tensor.offset, 3);
  EXPECT_EQ(Shown(*pickle, tensor.size), "(2 4)");
  EXPECT_EQ(Shown(*pickle, tensor.stride), "(4 1)");
  EXPECT_EQ(tensor.metadata.kind, PickleKind::kNone);
}

TEST(PickleTest, EveryWayToMakeATensor) {
  const std::string storage = pk::Storage("FloatStorage", "0", 4);
  const std::vector<std::string> v1 = {storage, "K\x01", pk::Ints({2}), pk::Ints({1})};
  std::vector<std::string> v2 = v1;
  v2.push_back("\x89");
  v2.push_back(pk::NoHooks());
  std::vector<std::string> v3 = v2;
  v3[0] = pk::Storage("UntypedStorage", "0", 16, "torch.storage");
  v3.push_back(pk::Global("torch", "uint16"));
  EXPECT_EQ(ValueOfWhole(pk::Call("torch._utils", "_rebuild_tensor", v1)), "tensor0");
  EXPECT_EQ(ValueOfWhole(pk::Call("torch._utils", "_rebuild_tensor_v2", v2)), "tensor0");
  EXPECT_EQ(ValueOfWhole(pk::Call("torch._utils", "_rebuild_tensor_v3", v3)), "tensor0");
  std::vector<std::string> v2m = v2;
  v2m.push_back(pk::Dict({{pk::Text("conj"), "\x88"}}));
  EXPECT_EQ(ValueOfWhole(pk::Call("torch._utils", "_rebuild_tensor_v2", v2m)), "tensor0");
  std::vector<std::string> v3m = v3;
  v3m.push_back("N");
  EXPECT_EQ(ValueOfWhole(pk::Call("torch._utils", "_rebuild_tensor_v3", v3m)), "tensor0");

  const std::string tensor = pk::Call("torch._utils", "_rebuild_tensor_v2", v2);
  EXPECT_EQ(
      ValueOfWhole(pk::Call("torch._utils", "_rebuild_parameter", {tensor, "\x88", pk::NoHooks()})),
      "tensor0");
  EXPECT_EQ(ValueOfWhole(pk::Call("torch._utils", "_rebuild_parameter_with_state",
                                  {tensor, "\x88", pk::NoHooks(), "}"})),
            "tensor0");
  EXPECT_EQ(ValueOfWhole(pk::Call("torch.nn.parameter", "Parameter", {tensor, "\x88"})), "tensor0");
  EXPECT_EQ(
      ValueOfWhole(pk::Global("torch.nn.parameter", "Parameter") + pk::Tuple({tensor}) + "\x81"),
      "tensor0");
  const auto from_type = [&](const std::string& function, const std::string& type,
                             const std::string& args) {
    return pk::Call("torch._tensor", "_rebuild_from_type_v2", {function, type, args, "}"});
  };
  const std::string rebuild = pk::Global("torch._utils", "_rebuild_tensor_v2");
  const std::string type = pk::Global("torch.nn.parameter", "Parameter");
  EXPECT_EQ(ValueOfWhole(from_type(rebuild, type, pk::Tuple(v2))), "tensor0");
  EXPECT_THAT(RefusalOfValue(from_type("N", type, pk::Tuple(v2))), HasSubstr("needs a function"));
  EXPECT_THAT(RefusalOfValue(from_type(rebuild, "N", pk::Tuple(v2))), HasSubstr("needs a class"));
  EXPECT_THAT(RefusalOfValue(from_type(rebuild, type, "N")), HasSubstr("needs a function"));
  EXPECT_THAT(RefusalOfValue(from_type(pk::Global("torch._tensor", "_rebuild_from_type_v2"), type,
                                       pk::Tuple({rebuild, type, pk::Tuple(v2), "}"}))),
              HasSubstr("needs a function that makes a tensor"));

  // Wrong numbers and kinds of arguments.
  for (size_t i = 0; i < 3; ++i) {
    const char* name[] = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"};
    std::vector<std::string> args = i == 0 ? v1 : i == 1 ? v2 : v3;
    for (size_t wrong = 0; wrong < 4; ++wrong) {
      std::vector<std::string> bad = args;
      bad[wrong] = "N";
      EXPECT_THAT(RefusalOfValue(pk::Call("torch._utils", name[i], bad)), HasSubstr("needs a"));
    }
    args.pop_back();
    EXPECT_THAT(RefusalOfValue(pk::Call("torch._utils", name[i], args)), HasSubstr(" arguments"));
    for (int more = 0; more < 4; ++more) args.push_back("N");
    EXPECT_THAT(RefusalOfValue(pk::Call("torch._utils", name[i], args)), HasSubstr(" arguments"));
  }
  v3[6] = pk::Global("torch", "FloatStorage");
  EXPECT_THAT(RefusalOfValue(pk::Call("torch._utils", "_rebuild_tensor_v3", v3)),
              HasSubstr("needs a dtype"));
  v3[6] = pk::Global("torch", "float4_e2m1fn_x2");
  EXPECT_THAT(RefusalOfValue(pk::Call("torch._utils", "_rebuild_tensor_v3", v3)),
              HasSubstr("torch.float4_e2m1fn_x2 has no counterpart"));
  v2[0] = pk::Storage("QInt8Storage", "0", 4);
  EXPECT_THAT(RefusalOfValue(pk::Call("torch._utils", "_rebuild_tensor_v2", v2)),
              HasSubstr("torch.QInt8Storage has no counterpart"));
  v2[0] = pk::Storage("UntypedStorage", "0", 4, "torch.storage");
  EXPECT_THAT(RefusalOfValue(pk::Call("torch._utils", "_rebuild_tensor_v2", v2)),
              HasSubstr("torch.storage.UntypedStorage has no counterpart"));
  EXPECT_THAT(RefusalOfValue(pk::Call("torch._utils", "_rebuild_parameter", {"N", "N", "N"})),
              HasSubstr("needs a tensor"));
}

TEST(PickleTest, APersistentIdIsAStorage) {
  const std::string type = pk::Global("torch", "FloatStorage");
  const auto id = [](const std::vector<std::string>& parts) {
    return RefusalOfValue(pk::Tuple(parts) + "Q");
  };
  EXPECT_EQ(id({pk::Text("storage"), type, pk::Text("0"), pk::Text("cpu"), "K\x04"}), "accepted");
  EXPECT_THAT(RefusalOfValue("NQ"), HasSubstr("BINPERSID: a persistent id that is no tuple of 5"));
  EXPECT_THAT(id({pk::Text("storage"), type, pk::Text("0"), pk::Text("cpu")}),
              HasSubstr("tuple of 5"));
  EXPECT_THAT(id({pk::Text("module"), type, pk::Text("0"), pk::Text("cpu"), "K\x04"}),
              HasSubstr("no storage"));
  EXPECT_THAT(id({"N", type, pk::Text("0"), pk::Text("cpu"), "K\x04"}), HasSubstr("no storage"));
  EXPECT_THAT(id({pk::Text("storage"), "N", pk::Text("0"), pk::Text("cpu"), "K\x04"}),
              HasSubstr("without a class of storages"));
  EXPECT_THAT(id({pk::Text("storage"), pk::Global("torch", "float32"), pk::Text("0"),
                  pk::Text("cpu"), "K\x04"}),
              HasSubstr("without a class of storages"));
  EXPECT_THAT(id({pk::Text("storage"), type, "K\x05", pk::Text("cpu"), "K\x04"}),
              HasSubstr("key or location is no text"));
  EXPECT_THAT(id({pk::Text("storage"), type, pk::Text("0"), "N", "K\x04"}),
              HasSubstr("key or location is no text"));
  for (const std::string& count :
       {std::string("N"), std::string("\x88"), std::string("J\xff\xff\xff\xff"),
        "\x8a\x09" + std::string(9, '\x01'), std::string("G12345678")}) {
    EXPECT_THAT(id({pk::Text("storage"), type, pk::Text("0"), pk::Text("cpu"), count}),
                HasSubstr("count is no number from 0"));
  }
}

TEST(PickleTest, EveryCutIsRefused) {
  const std::string good = pk::Whole(pk::Dict(
      {{pk::Text("w"), pk::Four()}, {pk::Text("x"), pk::List({"G12345678", "\x8a\x01z", "N"})}}));
  ASSERT_EQ(PickleRefusal(good), "accepted");
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_NE(PickleRefusal(good.substr(0, size)), "accepted") << size;
  }
}

TEST(PickleTest, AnOpcodeHasOneName) {
  for (size_t i = 0; i < kPickleOpcodeNames.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_NE(kPickleOpcodeNames[i].first, kPickleOpcodeNames[j].first);
      EXPECT_NE(kPickleOpcodeNames[i].second, kPickleOpcodeNames[j].second);
    }
  }
  EXPECT_EQ(kPickleOpcodeNames.size(), 68u);
}

}  // namespace
}  // namespace modelhost
