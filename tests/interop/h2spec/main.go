// Runs the cases of h2spec against one server; prints one JSON object, a result for each case.
//
// Arguments: host, port, path, and the names of cases to leave out. A case that fails gives what was
// expected and what came instead.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/summerwind/h2spec/config"
	"github.com/summerwind/h2spec/generic"
	"github.com/summerwind/h2spec/hpack"
	"github.com/summerwind/h2spec/http2"
	"github.com/summerwind/h2spec/spec"
)

const (
	// Time without a frame after which a case takes the server for silent: it has failed then.
	silence = 60 * time.Second
	atOnce  = 16
)

// A case's name is its section and its number there, as h2spec selects it.
type namedCase struct {
	name string
	test *spec.TestCase
}

func main() {
	port, err := strconv.Atoi(os.Args[2])
	must(err)
	asked := &config.Config{
		Host: os.Args[1], Port: port, Path: os.Args[3],
		Timeout: silence, MaxHeaderLen: 4000, Strict: true,
	}
	var cases []namedCase
	for _, group := range []*spec.TestGroup{generic.Spec(), http2.Spec(), hpack.Spec()} {
		cases = append(cases, casesOf(group)...)
	}

	results := make(map[string]string, len(cases))
	var lock sync.Mutex
	var running sync.WaitGroup
	places := make(chan struct{}, atOnce)
	for _, one := range cases {
		if slices.Contains(os.Args[4:], one.name) {
			continue
		}
		running.Add(1)
		places <- struct{}{}
		go func() {
			defer running.Done()
			result := run(asked, one.test)
			lock.Lock()
			results[one.name] = result
			lock.Unlock()
			<-places
		}()
	}
	running.Wait()
	must(json.NewEncoder(os.Stdout).Encode(results))
}

func casesOf(group *spec.TestGroup) []namedCase {
	var found []namedCase
	for index, test := range append(group.Tests, group.StrictTests...) {
		name := fmt.Sprintf("%s/%d", group.ID(), index+1)
		found = append(found, namedCase{name, test})
	}
	for _, part := range group.Groups {
		found = append(found, casesOf(part)...)
	}
	return found
}

// run returns "passed", "skipped", or why the case failed.
func run(asked *config.Config, test *spec.TestCase) string {
	connection, err := spec.Dial(asked)
	if err != nil {
		return "no connection: " + err.Error()
	}
	defer connection.Close()
	switch err := test.Run(asked, connection).(type) {
	case nil:
		return "passed"
	case *spec.TestError:
		return fmt.Sprintf("%s: expected %s; got %s", test.Desc, strings.Join(err.Expected, " or "), err.Actual)
	default:
		if err == spec.ErrSkipped {
			return "skipped"
		}
		return fmt.Sprintf("%s: %s", test.Desc, err)
	}
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
