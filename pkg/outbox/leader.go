package outbox

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/textproto"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Our streams allow direct gets, and nats.go then asks any replica: a follower may not have the newest message yet, or
// still have one that is deleted. What decides about a task is asked of the leader.

// A leaderMsg is a message as the stream's leader has it.
type leaderMsg struct {
	sequence uint64
	header   nats.Header
}

const (
	codeNoMessage  = 10037
	codeNotDeleted = 10057 // no message with that sequence
)

// askLeader looks a message up; nil when there is none. q is a request of the API's STREAM.MSG.GET.
func (r *Relay) askLeader(ctx context.Context, stream string, q map[string]any) (*leaderMsg, error) {
	var a struct {
		Message *struct {
			Seq    uint64 `json:"seq"`
			Header string `json:"hdrs"`
		} `json:"message"`
	}
	err := r.requestAPI(ctx, "STREAM.MSG.GET."+stream, q, &a)
	var e *jetstream.APIError
	switch {
	case errors.As(err, &e) && e.ErrorCode == codeNoMessage:
		return nil, nil
	case err != nil:
		return nil, err
	case a.Message == nil:
		return nil, errors.New("answer without a message")
	}
	m := &leaderMsg{sequence: a.Message.Seq, header: nats.Header{}}
	raw, err := base64.StdEncoding.DecodeString(a.Message.Header)
	if err != nil {
		return nil, fmt.Errorf("headers of message %d: %w", m.sequence, err)
	}
	// Line by line: the case of a name matters here, and net/textproto would change it.
	lines := textproto.NewReader(bufio.NewReader(strings.NewReader(string(raw))))
	for {
		line, err := lines.ReadLine()
		if err != nil || line == "" {
			return m, nil
		}
		if k, v, ok := strings.Cut(line, ":"); ok {
			m.header[k] = append(m.header[k], strings.TrimSpace(v))
		}
	}
}

// deleteFromStream removes one message; that it is gone already is no error.
func (r *Relay) deleteFromStream(ctx context.Context, stream string, sequence uint64) error {
	err := r.requestAPI(ctx, "STREAM.MSG.DELETE."+stream, map[string]any{"seq": sequence, "no_erase": true}, nil)
	var e *jetstream.APIError
	if errors.As(err, &e) && (e.ErrorCode == codeNoMessage || e.ErrorCode == codeNotDeleted) {
		return nil
	}
	return err
}

// requestAPI asks JetStream, which passes the question on to the leader, and decodes the answer.
func (r *Relay) requestAPI(ctx context.Context, verb string, q, answer any) error {
	body, err := json.Marshal(q)
	if err != nil {
		return err
	}
	m, err := r.nc.RequestWithContext(ctx, r.names.API()+verb, body)
	if err != nil {
		return err
	}
	var failed struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &failed); err != nil {
		return fmt.Errorf("%s: answer is no JSON: %w", verb, err)
	}
	if failed.Error != nil {
		return failed.Error
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(m.Data, answer)
}
