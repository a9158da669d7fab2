// A session on a real manager, below it a stream that takes and gives messages when the test says.
#include "daemon/service/worker_session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/registry/model_manager_test_fixture.h"
#include "daemon/service/worker_sessions.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Control thread.
class HandStream : public SessionStream {
 public:
  void Read() override {
    EXPECT_FALSE(reading);
    reading = true;
  }
  void Write(v1::SessionEvent event) override {
    EXPECT_FALSE(writing);
    EXPECT_FALSE(end.has_value());
    writing = true;
    written.push_back(std::move(event));
  }
  void Finish(const absl::Status& status) override {
    EXPECT_FALSE(end.has_value());
    end = status;
  }
  bool reading = false;
  bool writing = false;
  std::vector<v1::SessionEvent> written;
  std::optional<absl::Status> end;
};

class WorkerSessionTest : public ManagerTest {
 protected:
  void Begin(uint32_t uid = ::geteuid()) {
    Boot();
    OnLoop([&] { manager_->AddObserver(&sessions_); });
    Swap(1);
    Peer peer;
    peer.uid = uid;
    OnLoop([&] {
      session_ =
          std::make_shared<WorkerSession>(WorkerSession::Deps{*manager_, clock_}, peer, stream_);
      session_->Start(5, "/run/handles.sock");
      sessions_.Add(1, session_);
    });
    Written();
    ASSERT_EQ(stream_.written.size(), 1U);
    EXPECT_EQ(stream_.written[0].opened().epoch(), 5U);
    EXPECT_EQ(stream_.written[0].opened().handles_socket(), "/run/handles.sock");
    stream_.written.clear();
  }
  // The worker's side takes one message.
  void Written() {
    OnLoop([&] {
      ASSERT_TRUE(stream_.writing);
      stream_.writing = false;
      sessions_.With(1, [](WorkerSession& session) { session.OnWritten(); });
    });
  }
  // As long as there are some.
  void Drain() {
    while (OnLoop([&] { return stream_.writing; })) Written();
  }
  void Send(const v1::SessionRequest& request) {
    OnLoop([&] {
      ASSERT_TRUE(stream_.reading);
      stream_.reading = false;
      sessions_.With(1, [&](WorkerSession& session) { session.OnRead(&request); });
    });
  }
  static v1::SessionRequest AcquireOf(uint64_t id, uint64_t version = 0,
                                      const std::string& model = "planner") {
    v1::SessionRequest request;
    request.set_request_id(id);
    v1::WorkerRef* ref = request.mutable_acquire()->add_refs();
    ref->set_model(model);
    ref->set_version(version);
    return request;
  }
  static v1::SessionRequest ReleaseOf(uint64_t lease) {
    v1::SessionRequest request;
    request.set_request_id(77);
    request.mutable_release()->set_lease(lease);
    return request;
  }
  // Sends it, and the last that was answered.
  v1::SessionEvent Ask(const v1::SessionRequest& request) {
    Send(request);
    Drain();
    return OnLoop([&] {
      EXPECT_FALSE(stream_.written.empty());
      return stream_.written.empty() ? v1::SessionEvent() : stream_.written.back();
    });
  }
  uint64_t Leases() {
    return OnLoop([&] { return manager_->Status().leases; });
  }

  WorkerSessions sessions_;
  HandStream stream_;
  std::shared_ptr<WorkerSession> session_;
};

TEST_F(WorkerSessionTest, AGrantDescribesWhatTheTicketBrings) {
  Begin();
  const v1::SessionEvent event = Ask(AcquireOf(3));
  EXPECT_EQ(event.request_id(), 3U);
  ASSERT_EQ(event.granted().grants_size(), 1) << event.DebugString();
  const v1::Grant& grant = event.granted().grants(0);
  EXPECT_EQ(grant.model(), "planner");
  EXPECT_EQ(grant.version(), 1U);
  EXPECT_EQ(grant.label(), "stable");
  EXPECT_EQ(grant.generation(), 1U);
  EXPECT_EQ(grant.digest().size(), 64U);
  EXPECT_EQ(grant.ticket().size(), 16U);
  EXPECT_EQ(grant.ticket_life().seconds(), 60);
  ASSERT_EQ(grant.regions_size(), 1);
  EXPECT_GT(grant.regions(0).bytes(), 0U);
  EXPECT_EQ(grant.regions(0).kind(), "file");
  EXPECT_TRUE(grant.regions(0).with_grant());
  EXPECT_FALSE(grant.has_device());
  LeaseTicket ticket;
  std::ranges::copy(grant.ticket(), ticket.begin());
  const SessionId connection = NewSession();
  EXPECT_EQ(OnLoop([&] { return manager_->Redeem(connection, ticket)->grant.lease; }),
            grant.lease());
}

TEST_F(WorkerSessionTest, AReleasedLeaseIsOverAndAnothersIsNotItsToRelease) {
  Begin();
  const uint64_t lease = Ask(AcquireOf(1)).granted().grants(0).lease();
  EXPECT_EQ(Leases(), 1U);
  EXPECT_EQ(Ask(ReleaseOf(lease)).released().lease(), lease);
  EXPECT_EQ(Leases(), 0U);
  EXPECT_EQ(Ask(ReleaseOf(lease)).error().code(), 5);  // NOT_FOUND
  const SessionId other = NewSession();
  const auto theirs = Acquire(other, {"planner", "stable", 0, {}});
  ASSERT_TRUE(theirs.ok());
  EXPECT_EQ(Ask(ReleaseOf((*theirs)[0].lease)).error().code(), 5);
  EXPECT_EQ(Leases(), 1U);
}

TEST_F(WorkerSessionTest, MalformedRequestsAreAnsweredAndTheStreamGoesOn) {
  Begin();
  EXPECT_EQ(Ask({}).error().code(), 3);  // INVALID_ARGUMENT
  EXPECT_EQ(Ask(AcquireOf(1, 0, "../x")).error().code(), 3);
  v1::SessionRequest both = AcquireOf(1, 1);
  both.mutable_acquire()->mutable_refs(0)->set_label("stable");
  EXPECT_THAT(Ask(both).error().message(), HasSubstr("both a version and a label"));
  v1::SessionRequest none = AcquireOf(1);
  none.mutable_acquire()->clear_refs();
  EXPECT_EQ(Ask(none).error().code(), 3);
  v1::SessionRequest many = AcquireOf(1);
  for (int i = 0; i < 32; ++i) *many.mutable_acquire()->add_refs() = many.acquire().refs(0);
  EXPECT_THAT(Ask(many).error().message(), HasSubstr("33 references"));
  v1::SessionRequest digest = AcquireOf(1);
  digest.mutable_acquire()->mutable_refs(0)->set_digest("zz");
  EXPECT_EQ(Ask(digest).error().code(), 3);
  v1::SessionRequest gpu = AcquireOf(1);
  gpu.mutable_acquire()->set_gpu_required(true);
  EXPECT_EQ(Ask(gpu).error().code(), 3);
  v1::SessionRequest late = AcquireOf(1);
  late.mutable_acquire()->mutable_timeout()->set_seconds(-1);
  EXPECT_EQ(Ask(late).error().code(), 3);
  EXPECT_TRUE(Ask(AcquireOf(2)).has_granted());
}

TEST_F(WorkerSessionTest, ErrorsSayWhatTheyAre) {
  Begin();
  const v1::Failure failure = Ask(AcquireOf(1, 0, "plannr")).error();
  EXPECT_EQ(failure.code(), 5);
  EXPECT_EQ(failure.reason(), "NOT_FOUND");
  EXPECT_THAT(failure.message(), HasSubstr("planner"));
}

TEST_F(WorkerSessionTest, AMoveOfALabelIsToldToWhoHoldsItAndOnlyTheLast) {
  Begin();
  Ask(AcquireOf(1));
  Send(AcquireOf(2));  // Nobody takes the answer.
  Swap(2);
  Swap(1);
  Swap(2);
  OnLoop([&] { stream_.written.clear(); });
  Drain();
  ASSERT_EQ(stream_.written.size(), 1U);
  const v1::GenerationChanged& changed = stream_.written[0].generation_changed();
  EXPECT_EQ(changed.model(), "planner");
  EXPECT_EQ(changed.label(), "stable");
  EXPECT_EQ(changed.version(), 2U);
  EXPECT_EQ(changed.generation(), 4U);
}

TEST_F(WorkerSessionTest, AFixedVersionIsToldOfNoMove) {
  Begin();
  Ask(AcquireOf(1, 1));
  OnLoop([&] { stream_.written.clear(); });
  Swap(2);
  Drain();
  EXPECT_TRUE(stream_.written.empty());
}

TEST_F(WorkerSessionTest, AVersionOnItsWayOutAndAnEvictionAreTold) {
  Begin();
  const uint64_t lease = Ask(AcquireOf(1)).granted().grants(0).lease();
  const uint64_t second = Ask(AcquireOf(2)).granted().grants(0).lease();
  Swap(2);
  Drain();
  OnLoop([&] { stream_.written.clear(); });
  const auto unload = OnLoop([&] {
    return manager_->Unload({"planner", 1}, std::nullopt, false, 0);
  });
  Drain();
  ASSERT_EQ(stream_.written.size(), 2U);
  EXPECT_EQ(stream_.written[0].draining().lease(), lease);
  EXPECT_EQ(stream_.written[0].draining().version(), 1U);
  EXPECT_EQ(stream_.written[1].draining().lease(), second);
  OnLoop([&] { return manager_->Evict(lease); }).IgnoreError();
  Drain();
  EXPECT_EQ(stream_.written.back().evicted().lease(), lease);
  Ask(ReleaseOf(second));
  EXPECT_TRUE(Await(unload).status.ok());
}

TEST_F(WorkerSessionTest, LeasesEndWithTheStreamHoweverItEnds) {
  for (const bool cancelled : {true, false}) {
    SCOPED_TRACE(cancelled);
    Begin();
    Ask(AcquireOf(1));
    EXPECT_EQ(Leases(), 1U);
    OnLoop([&] {
      sessions_.With(1, [&](WorkerSession& session) {
        if (cancelled) {
          session.OnCancel();
        } else {
          stream_.reading = false;
          session.OnRead(nullptr);
        }
      });
    });
    EXPECT_EQ(Leases(), 0U);
    ASSERT_TRUE(stream_.end.has_value());
    EXPECT_EQ(stream_.end->ok(), !cancelled);
    EXPECT_EQ(OnLoop([&] { return sessions_.size(); }), 0U);
    Shutdown();
    stream_ = {};
  }
}

TEST_F(WorkerSessionTest, AStreamThatEndsWhileItWritesIsFinishedAfterwards) {
  Begin();
  Send(AcquireOf(1));
  OnLoop([&] {
    ASSERT_TRUE(stream_.writing);
    sessions_.With(1, [](WorkerSession& session) { session.OnCancel(); });
  });
  EXPECT_EQ(Leases(), 0U);
  EXPECT_FALSE(stream_.end.has_value());
  Written();
  EXPECT_TRUE(stream_.end.has_value());
}

TEST_F(WorkerSessionTest, ADaemonThatStopsSaysSoFirst) {
  Begin();
  Ask(AcquireOf(1));
  OnLoop([&] { sessions_.StopAll(); });
  EXPECT_EQ(Leases(), 0U);
  Drain();
  EXPECT_TRUE(stream_.written.back().has_closing());
  ASSERT_TRUE(stream_.end.has_value());
  EXPECT_TRUE(absl::IsUnavailable(*stream_.end));
}

TEST_F(WorkerSessionTest, WhoDoesNotReadAnswersIsNotReadAnyMore) {
  Begin();
  size_t sent = 0;
  while (OnLoop([&] { return stream_.reading; })) {
    ASSERT_LT(sent, 100U);
    Send(AcquireOf(++sent));
  }
  EXPECT_EQ(sent, WorkerSession::kMostAnswers + 1);  // One of them is under way.
  Written();
  EXPECT_TRUE(OnLoop([&] { return stream_.reading; }));
}

TEST_F(WorkerSessionTest, AWaitingAcquireIsAnsweredWhenItsVersionIsReadyAndEndsWithTheStream) {
  Begin();
  v1::SessionRequest waiting = AcquireOf(9, 2);
  waiting.mutable_acquire()->mutable_timeout()->set_seconds(20);
  Send(waiting);
  EXPECT_FALSE(OnLoop([&] { return stream_.writing; }));
  EXPECT_EQ(Ask(AcquireOf(10)).request_id(), 10U);  // Others are answered meanwhile.
  Load(2);
  Eventually([&] { return stream_.writing; });
  Drain();
  EXPECT_EQ(stream_.written.back().request_id(), 9U);
  EXPECT_EQ(stream_.written.back().granted().grants(0).version(), 2U);
  waiting.mutable_acquire()->mutable_refs(0)->set_version(7);
  Send(waiting);
  OnLoop([&] { sessions_.With(1, [](WorkerSession& session) { session.OnCancel(); }); });
  EXPECT_EQ(Leases(), 0U);
}

TEST_F(WorkerSessionTest, ARedeclaredLeaseHasNoTicketAndKeepsItsLabel) {
  Begin();
  v1::SessionRequest request = AcquireOf(1, 1);
  request.mutable_acquire()->set_redeclare(true);
  request.mutable_acquire()->mutable_refs(0)->set_label("stable");
  const v1::Grant grant = Ask(request).granted().grants(0);
  EXPECT_EQ(grant.version(), 1U);
  EXPECT_EQ(grant.ticket(), "");
  EXPECT_EQ(OnLoop([&] { return manager_->Leases().at(0).label; }), "stable");
  Swap(2);
  Drain();
  EXPECT_EQ(stream_.written.back().generation_changed().version(), 2U);
}

TEST_F(WorkerSessionTest, WhoDeclaresAgainHearsWhereTheLabelWentMeanwhile) {
  Begin();
  Swap(2);
  v1::SessionRequest request = AcquireOf(1, 1);
  request.mutable_acquire()->set_redeclare(true);
  request.mutable_acquire()->mutable_refs(0)->set_label("stable");
  Send(request);
  Drain();
  ASSERT_EQ(stream_.written.size(), 2U);
  EXPECT_EQ(stream_.written[0].granted().grants(0).version(), 1U);
  EXPECT_EQ(stream_.written[1].generation_changed().label(), "stable");
  EXPECT_EQ(stream_.written[1].generation_changed().version(), 2U);
  EXPECT_EQ(stream_.written[1].generation_changed().generation(), 2U);
  request.mutable_acquire()->mutable_refs(0)->set_label("gone");
  EXPECT_EQ(Ask(request).generation_changed().version(), 0U);
}

TEST_F(WorkerSessionTest, WhoDeclaresALabelAgainFollowsIt) {
  Begin();
  v1::SessionRequest request = AcquireOf(1);
  request.mutable_acquire()->set_redeclare(true);
  EXPECT_EQ(Ask(request).granted().grants(0).version(), 1U);
  Swap(2);
  Drain();
  EXPECT_EQ(stream_.written.back().generation_changed().label(), "stable");
  EXPECT_EQ(stream_.written.back().generation_changed().version(), 2U);
}

TEST_F(WorkerSessionTest, WhatIsNoRequestEndsTheStreamAndItsLeases) {
  Begin();
  Ask(AcquireOf(1));
  OnLoop([&] {
    stream_.reading = false;
    sessions_.With(1, [](WorkerSession& session) {
      session.OnBadRequest(absl::InvalidArgumentError("too long"));
    });
  });
  EXPECT_EQ(Leases(), 0U);
  ASSERT_TRUE(stream_.end.has_value());
  EXPECT_TRUE(absl::IsInvalidArgument(*stream_.end));
}

TEST_F(WorkerSessionTest, WhoMayNotReadTheModelGetsNoLease) {
  Begin(::geteuid() + 1);
  EXPECT_EQ(Ask(AcquireOf(1)).error().code(), 7);  // PERMISSION_DENIED
  EXPECT_EQ(Leases(), 0U);
}

}  // namespace
}  // namespace modelhost
