package streammeta

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"
)

const (
	firstPause   = 10 * time.Millisecond
	longestPause = time.Second
	suspicion    = 5 * time.Second // for which hints at a failed controller are ignored
	learnedMost  = 16              // endpoints learned from hints
	hintsMost    = 4               // hints followed in a row, before the rotation continues
)

// router believes in one leader at a time. After a failure it follows the hint of a controller, or
// asks the next endpoint. It does no I/O, and now and random are replaced in tests.
type router struct {
	mu         sync.Mutex
	endpoints  []string
	configured int
	current    string
	turn       int
	failures   int
	hints      int
	epoch      int64
	suspected  map[string]time.Time

	now    func() time.Time
	random func() float64
}

func newRouter(endpoints []string) *router {
	endpoints = slices.Clone(endpoints)
	return &router{
		endpoints:  endpoints,
		configured: len(endpoints),
		current:    endpoints[0],
		suspected:  map[string]time.Time{},
		now:        time.Now,
		random:     rand.Float64,
	}
}

// leader returns the endpoint to ask next.
func (r *router) leader() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.current
}

// recordAnswer notes that endpoint answered as the leader.
func (r *router) recordAnswer(endpoint string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.suspected, endpoint)
	r.current, r.failures, r.hints = endpoint, 0, 0
}

// recordFailure chooses the next endpoint after a failure of endpoint, and returns how long to wait
// before it is asked.
func (r *router) recordFailure(endpoint string, failure *Error) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Another call may have found the leader in the meantime.
	if endpoint != r.current {
		return 0
	}
	r.failures++

	kind := kindOf(failure)
	if kind == notNow {
		return max(r.pause(), failure.RetryAfter)
	}
	if kind == unreachable || kind == timedOut {
		r.suspected[endpoint] = r.now().Add(suspicion)
	}
	if kind == notLeader && r.follow(failure) {
		return 0
	}

	r.hints = 0
	r.turn = (slices.Index(r.endpoints, endpoint) + 1) % len(r.endpoints)
	r.current = r.endpoints[r.turn]
	// A first round over all endpoints costs no wait, because one of them may lead.
	if r.failures < len(r.endpoints) {
		return 0
	}
	return r.pause()
}

// follow moves to the leader that a controller names. It reports false if the hint says nothing new.
func (r *router) follow(failure *Error) bool {
	hint := failure.Metadata["leader_endpoint"]
	epoch, err := strconv.ParseInt(failure.Metadata["epoch"], 10, 64)
	if err != nil || hint == "" || hint == r.current || epoch < r.epoch || r.hints >= hintsMost {
		return false
	}
	// A follower notices later than a client that its leader is gone. A new epoch proves news.
	if r.now().Before(r.suspected[hint]) && epoch == r.epoch {
		return false
	}

	if !slices.Contains(r.endpoints, hint) {
		if len(r.endpoints) >= r.configured+learnedMost {
			return false
		}
		r.endpoints = append(r.endpoints, hint)
	}
	r.epoch, r.current = epoch, hint
	r.hints++
	return true
}

// pause returns a wait that grows with the failures in a row, drawn from its upper half so that
// callers that failed together do not return together.
func (r *router) pause() time.Duration {
	longest := min(firstPause<<min(r.failures, 10), longestPause)
	return longest/2 + time.Duration(r.random()*float64(longest/2))
}
