package streammeta

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

type manualClock struct{ now time.Time }

func newTestRouter(endpoints ...string) (*router, *manualClock) {
	clock := &manualClock{time.Unix(0, 0)}
	router := newRouter(endpoints)
	router.now = func() time.Time { return clock.now }
	router.random = func() float64 { return 0 }
	return router, clock
}

func notLeaderAt(hint string, epoch int) *Error {
	return &Error{
		Code:     codes.Unavailable,
		Reason:   reasonNotLeader,
		Metadata: map[string]string{"leader_endpoint": hint, "epoch": strconv.Itoa(epoch)},
	}
}

var broken = &Error{Code: codes.Unavailable}

func TestAHintIsFollowedAtOnce(t *testing.T) {
	router, _ := newTestRouter("a", "b")
	if wait := router.recordFailure("a", notLeaderAt("c", 1)); wait != 0 || router.leader() != "c" {
		t.Fatalf("asks %s after %v, expected c at once", router.leader(), wait)
	}
}

func TestAHintAtAFailedControllerIsIgnoredUntilTheEpochGrows(t *testing.T) {
	router, clock := newTestRouter("a", "b")
	router.recordFailure("a", notLeaderAt("b", 1))
	router.recordFailure("b", broken)
	if router.recordFailure("a", notLeaderAt("b", 1)); router.leader() != "b" {
		t.Fatalf("the rotation asks %s, expected b", router.leader())
	}
	if router.hints != 0 {
		t.Fatal("the hint was followed")
	}
	router.recordFailure("b", broken)
	router.recordFailure("a", notLeaderAt("b", 2))
	if router.hints != 1 {
		t.Fatal("a hint of a newer epoch was ignored")
	}
	router.recordFailure("b", broken)
	clock.now = clock.now.Add(suspicion)
	router.recordFailure("a", notLeaderAt("b", 2))
	if router.hints != 1 {
		t.Fatal("the suspicion did not end")
	}
}

func TestAHintOfAnOlderEpochIsIgnored(t *testing.T) {
	router, _ := newTestRouter("a", "b", "c")
	router.recordFailure("a", notLeaderAt("c", 7))
	router.recordFailure("c", notLeaderAt("b", 6))
	if router.hints != 0 {
		t.Fatal("the hint was followed")
	}
}

func TestABusyLeaderIsAskedAgainAfterItsTime(t *testing.T) {
	router, _ := newTestRouter("a", "b")
	busy := &Error{Code: codes.ResourceExhausted, Reason: "BUSY", RetryAfter: 3 * time.Second}
	if wait := router.recordFailure("a", busy); wait != 3*time.Second || router.leader() != "a" {
		t.Fatalf("asks %s after %v, expected a after 3 s", router.leader(), wait)
	}
}

func TestALateFailureOfAnotherEndpointChangesNothing(t *testing.T) {
	router, _ := newTestRouter("a", "b")
	router.recordAnswer("b")
	if wait := router.recordFailure("a", broken); wait != 0 || router.leader() != "b" {
		t.Fatalf("asks %s after %v, expected b at once", router.leader(), wait)
	}
}

// Whatever controllers answer, every configured endpoint is asked again and again, waits stay bounded,
// and memory does too.
func TestEveryEndpointIsAskedWhateverOthersAnswer(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 0))
		router, clock := newTestRouter("a", "b", "c")
		asked := map[string]int{}
		for range 400 {
			endpoint := router.leader()
			asked[endpoint]++
			failure := broken
			switch random.IntN(3) {
			case 0:
				failure = notLeaderAt("x"+strconv.Itoa(random.IntN(40)), random.IntN(5))
			case 1:
				failure = notLeaderAt([]string{"a", "b", "c"}[random.IntN(3)], random.IntN(5))
			}
			wait := router.recordFailure(endpoint, failure)
			if wait < 0 || wait > longestPause {
				t.Fatalf("seed %d: waits %v", seed, wait)
			}
			clock.now = clock.now.Add(wait)
		}
		for _, endpoint := range []string{"a", "b", "c"} {
			if asked[endpoint] < 5 {
				t.Fatalf("seed %d: asked %s %d times of 400", seed, endpoint, asked[endpoint])
			}
		}
		if len(router.endpoints) > 3+learnedMost || !slices.Contains(router.endpoints, "a") {
			t.Fatalf("seed %d: knows %v", seed, router.endpoints)
		}
	}
}
