package doctor

import "time"

// Levels of a finding.
const (
	Problem = "problem" // something does not go on, or will not without the relay or a person
	Notice  = "notice"  // worth knowing
)

// A Finding is one thing that is not as it should be.
type Finding struct {
	Level string `json:"level"`
	Code  string `json:"code"`  // for programs: does not change with the wording
	Where string `json:"where"` // a lane, a stream, a worker, a server
	What  string `json:"what"`
	Relay string `json:"relay"`         // what the relay does about it, and when
	You   string `json:"you"`           // what a person should do
	IDs   []ID   `json:"ids,omitempty"` // tasks concerned, the first of them
	fix   *fix   // what --fix asks for
}

// Report is all that was found.
type Report struct {
	At       time.Time `json:"at"`
	Schema   string    `json:"schema"`
	Healthy  bool      `json:"healthy"` // no problem was found
	Postgres Postgres  `json:"postgres"`
	NATS     NATS      `json:"nats"`
	Lanes    []Lane    `json:"lanes"`
	Relays   []Member  `json:"relays"`
	Workers  []Member  `json:"workers"`
	Findings []Finding `json:"findings"`
	Fixed    []Fixed   `json:"fixed,omitempty"`

	installation string // ours, "" when Postgres did not say
}

// Postgres is what the table's server says of itself.
type Postgres struct {
	Reachable     bool       `json:"reachable"`
	Error         string     `json:"error,omitempty"`
	Version       string     `json:"version,omitempty"`
	SchemaVersion int64      `json:"schema_version,omitempty"`
	SchemaNeeded  int64      `json:"schema_needed"`
	Installation  string     `json:"installation,omitempty"`
	Incarnation   string     `json:"incarnation,omitempty"` // changes with each crash and each failover
	Since         *time.Time `json:"incarnation_since,omitempty"`
	ClockAheadMS  int64      `json:"clock_ahead_ms"` // of this machine's, as far as the round trip lets one tell
	Losses        int        `json:"losses"`         // how often the stream has lost messages, as far as relays have seen

	streamCreated, deadStreamCreated *time.Time
	deadLettered                     int64 // dead rows whose letter is out, counted up to lookLimit
}

// NATS is what the streams' server says.
type NATS struct {
	Reachable bool     `json:"reachable"`
	Error     string   `json:"error,omitempty"`
	Server    string   `json:"server,omitempty"`
	Version   string   `json:"version,omitempty"`
	Streams   []Stream `json:"streams"`
}

// Stream is one of the three.
type Stream struct {
	Name         string    `json:"name"`
	Exists       bool      `json:"exists"`
	Installation string    `json:"installation,omitempty"`
	Created      time.Time `json:"created,omitzero"`
	Messages     uint64    `json:"messages"`
	Bytes        uint64    `json:"bytes"`
	LastSequence uint64    `json:"last_sequence"`
	Leader       string    `json:"leader,omitempty"` // of a cluster
}

// Lane is one biz type at one priority, on both sides.
type Lane struct {
	BizType     string `json:"biz_type"`
	Priority    string `json:"priority"`
	Paused      bool   `json:"paused"`
	Relay       string `json:"relay,omitempty"` // that holds it
	LiveWorkers int    `json:"live_workers"`    // that know the type

	// The table.
	Due        int64 `json:"due"`            // to be published, and not yet
	OldestDue  int64 `json:"oldest_due_ms"`  // how long the oldest of them has been due
	Open       int64 `json:"open"`           // unfinished
	AtLeast    bool  `json:"open_at_least"`  // there are more than were read
	Running    int64 `json:"running"`        // under a lease that holds
	LeaseEnded int64 `json:"lease_ended"`    // running, says the row, but the lease has ended
	OnList     int64 `json:"on_work_list"`   // the relay looks at these rows at a set time
	Letters    int64 `json:"letters_to_do"`  // dead, and the letter not out
	Published  int64 `json:"with_a_message"` // should have a message in the stream

	// The stream.
	Messages    uint64 `json:"messages"`
	Consumer    bool   `json:"consumer"`
	Pending     uint64 `json:"pending"`     // not delivered yet
	AckPending  int    `json:"ack_pending"` // delivered, not answered; retries that wait are among them
	Redelivered int    `json:"redelivered"`

	// Both.
	Compared bool  `json:"compared"` // task by task; not when there is too much
	Lost     int64 `json:"lost"`     // tasks whose message is not there
	Stale    int64 `json:"stale"`    // messages whose task needs none: dropped when they are delivered
	Foreign  int64 `json:"foreign"`  // messages of another installation

	maxSeq int64
	losses int
	orphan bool
	full   bool
}

// Member is a relay or a worker that has said it is alive.
type Member struct {
	Name      string    `json:"name"`
	Host      string    `json:"host"`
	PID       int       `json:"pid"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	SilentMS  int64     `json:"silent_ms"` // since it said so last
	BizTypes  []string  `json:"biz_types"`
	Lanes     int       `json:"lanes,omitempty"`     // of a relay
	Running   int       `json:"running,omitempty"`   // of a worker, as it says
	Leases    int       `json:"leases,omitempty"`    // of a worker, as the rows say
	OldestMS  int64     `json:"oldest_ms,omitempty"` // for how long its longest attempt has been running
	OldestID  ID        `json:"oldest_id,omitempty"` // its task
}

// Fixed is one request to the relay.
type Fixed struct {
	Code  string `json:"code"` // of the finding
	Where string `json:"where"`
	Did   string `json:"did"`
	Error string `json:"error,omitempty"`
}

func (r *Report) add(f Finding) { r.Findings = append(r.Findings, f) }

// Unreachable reports whether a server did not answer.
func (r *Report) Unreachable() bool { return !r.Postgres.Reachable || !r.NATS.Reachable }
