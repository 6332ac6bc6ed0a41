package demo

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// call is what a service of the outside world is asked.
type call struct {
	Operation string // such as "refund"
	Key       string // the Idempotency-Key
	Nth       int    // how many calls with this key came before
	order
}

// order is the body of a call.
type order struct {
	Ref      string `json:"ref"` // the caller's own number, such as "A-12"
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

// verdict is how the script lets a call end.
type verdict struct {
	status int    // 0: the service books and then never answers
	book   bool   // the effect happens, whatever the answer says
	text   string // of the error
}

var booked = verdict{status: http.StatusCreated, book: true}

// service is one party of the outside world. It keeps books by idempotency key, as such services do: a second call
// with the same key changes nothing and gets the first one's reference.
type service struct {
	name   string
	script func(call) verdict
	url    string
	server *http.Server

	mu    sync.Mutex
	calls map[string]int   // by key
	books map[string]entry // by key
}

// entry is one line in a service's books.
type entry struct {
	call
	Reference string
}

func startService(name string, script func(call) verdict) (*service, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	s := &service{
		name: name, script: script, url: "http://" + l.Addr().String(),
		calls: map[string]int{}, books: map[string]entry{},
	}
	s.server = &http.Server{Handler: s, ReadHeaderTimeout: 5 * time.Second}
	go s.server.Serve(l) // ends with stop
	return s, nil
}

func (s *service) stop() { s.server.Close() }

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body order
	// Read to the end: only then does the server notice that the caller went away.
	b, err := io.ReadAll(io.LimitReader(r.Body, 1<<16))
	if err == nil {
		err = json.Unmarshal(b, &body)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c := call{Operation: r.URL.Path[1:], Key: r.Header.Get("Idempotency-Key"), order: body}

	s.mu.Lock()
	c.Nth = s.calls[c.Key]
	s.calls[c.Key]++
	v := s.script(c)
	e, known := s.books[c.Key]
	if v.book && !known {
		e = entry{call: c, Reference: fmt.Sprintf("%s-%05d", s.name, len(s.books)+1)}
		s.books[c.Key] = e
	}
	s.mu.Unlock()

	if v.status == 0 {
		<-r.Context().Done() // the caller gave up
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(v.status)
	answer := map[string]string{"reference": e.Reference}
	if v.status >= 300 {
		answer = map[string]string{"error": cmp.Or(v.text, http.StatusText(v.status))}
	}
	json.NewEncoder(w).Encode(answer)
}

// seen says how many calls came with the key.
func (s *service) seen(key string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[key]
}

// total counts and sums what is booked under an operation.
func (s *service) total(operation string) (n int, cents int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.books {
		if e.Operation == operation {
			n++
			cents += e.Cents
		}
	}
	return n, cents
}

// open lists the refs with an entry for "open" and none for "cancel".
func (s *service) open() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	refs := map[string]bool{}
	for _, e := range s.books {
		if e.Operation == "open" {
			refs[e.Ref] = true
		}
	}
	for _, e := range s.books {
		if e.Operation == "cancel" {
			delete(refs, e.Ref)
		}
	}
	return refs
}

// statusError is an answer of a service that is not 2xx.
type statusError struct {
	service string
	status  int
	text    string
}

func (e *statusError) Error() string {
	return fmt.Sprintf("%s answered %d: %s", e.service, e.status, e.text)
}

// ErrorClass is what the attempt log groups by.
func (e *statusError) ErrorClass() string { return fmt.Sprintf("http_%d", e.status) }

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 32}}

// ask calls a service and returns the reference it booked under.
func (s *service) ask(ctx context.Context, operation, key string, o order) (string, error) {
	body, err := json.Marshal(o)
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/"+operation, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	resp, err := client.Do(req)
	if err != nil {
		return "", fmt.Errorf("call %s: %w", s.name, err)
	}
	defer resp.Body.Close()
	var answer struct{ Reference, Error string }
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<16)).Decode(&answer); err != nil {
		return "", fmt.Errorf("read the answer of %s: %w", s.name, err)
	}
	if resp.StatusCode >= 300 {
		return "", &statusError{service: s.name, status: resp.StatusCode, text: answer.Error}
	}
	return answer.Reference, nil
}
