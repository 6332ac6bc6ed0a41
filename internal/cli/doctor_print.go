package cli

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/taskrelay/taskrelay/internal/doctor"
)

// printReport writes what was found: all of it as JSON, the findings alone as lines, or for people.
func printReport(p *printer, r *doctor.Report) error {
	switch p.format {
	case "json":
		return p.json(r)
	case "table":
		return describeReport(p, r)
	}
	return printAll(p, r.Findings, func(f doctor.Finding) string { return f.Code }, []column[doctor.Finding]{
		{title: "LEVEL", cell: func(f doctor.Finding) string { return f.Level }},
		{title: "CODE", cell: func(f doctor.Finding) string { return f.Code }},
		{title: "WHERE", cell: func(f doctor.Finding) string { return f.Where }},
		{title: "WHAT", cell: func(f doctor.Finding) string { return f.What }},
		{title: "RELAY", cell: func(f doctor.Finding) string { return f.Relay }},
		{title: "YOU", cell: func(f doctor.Finding) string { return f.You }},
	})
}

func describeReport(p *printer, r *doctor.Report) error {
	w := p.out
	describeServers(w, r)
	if len(r.Lanes) > 0 {
		fmt.Fprintln(w, "\nLANES     in the table: due, running, on the work list, letters not out; in the stream: messages, out (delivered, not answered), again")
		if err := printAll(p, r.Lanes, func(l doctor.Lane) string { return l.BizType }, laneColumns(r)); err != nil {
			return err
		}
	}
	if len(r.Relays)+len(r.Workers) > 0 {
		fmt.Fprintln(w, "\nALIVE")
		if err := printAll(p, memberLines(r), func(m member) string { return m.Name }, memberColumns()); err != nil {
			return err
		}
	}
	fmt.Fprintln(w)
	describeFindings(w, r)
	for _, f := range r.Fixed {
		if f.Error != "" {
			fmt.Fprintf(w, "FAILED  %s, %s: %s\n", f.Where, f.Code, oneLine(f.Error))
			continue
		}
		fmt.Fprintf(w, "FIXED   %s: %s\n", f.Where, oneLine(f.Did))
	}
	return nil
}

func describeServers(w io.Writer, r *doctor.Report) {
	if pg := r.Postgres; !pg.Reachable {
		fmt.Fprintln(w, "postgres  does not answer")
	} else {
		fmt.Fprintf(w, "postgres  %s, schema %s version %d (this program needs %d), installation %s\n", cmp.Or(pg.Version, "?"), r.Schema, pg.SchemaVersion,
			pg.SchemaNeeded, cmp.Or(pg.Installation, "?"))
		fmt.Fprintf(w, "          incarnation %s since %s, clock of this machine %+d ms, losses of the stream so far %d\n", cmp.Or(pg.Incarnation, "not known"),
			cmp.Or(stamp(pg.Since), "?"), pg.ClockAheadMS, pg.Losses)
	}
	if !r.NATS.Reachable {
		fmt.Fprintln(w, "nats      does not answer")
		return
	}
	fmt.Fprintf(w, "nats      %s\n", cmp.Or(r.NATS.Version, "?"))
	for _, s := range r.NATS.Streams {
		if !s.Exists {
			fmt.Fprintf(w, "          %-14s does not exist\n", s.Name)
			continue
		}
		fmt.Fprintf(w, "          %-14s %d messages, last %d, created %s\n", s.Name, s.Messages, s.LastSequence, stamp(&s.Created))
	}
}

func laneColumns(r *doctor.Report) []column[doctor.Lane] {
	number := func(title string, get func(doctor.Lane) int64) column[doctor.Lane] {
		return column[doctor.Lane]{title: title, cell: func(l doctor.Lane) string { return itoa(get(l)) }}
	}
	stream := func(title string, get func(doctor.Lane) int64) column[doctor.Lane] {
		return column[doctor.Lane]{title: title, cell: func(l doctor.Lane) string {
			if !r.NATS.Reachable {
				return "?"
			}
			return itoa(get(l))
		}}
	}
	return []column[doctor.Lane]{
		{title: "TYPE", cell: func(l doctor.Lane) string { return l.BizType }},
		{title: "PRIORITY", cell: func(l doctor.Lane) string { return l.Priority }},
		number("DUE", func(l doctor.Lane) int64 { return l.Due }),
		{title: "OPEN", cell: func(l doctor.Lane) string {
			if l.AtLeast {
				return itoa(l.Open) + "+"
			}
			return itoa(l.Open)
		}},
		number("RUNNING", func(l doctor.Lane) int64 { return l.Running }),
		number("LEASE ENDED", func(l doctor.Lane) int64 { return l.LeaseEnded }),
		number("ON LIST", func(l doctor.Lane) int64 { return l.OnList }),
		number("LETTERS", func(l doctor.Lane) int64 { return l.Letters }),
		stream("MESSAGES", func(l doctor.Lane) int64 { return int64(l.Messages) }),
		stream("OUT", func(l doctor.Lane) int64 { return int64(l.AckPending) }),
		stream("AGAIN", func(l doctor.Lane) int64 { return int64(l.Redelivered) }),
		{title: "LOST", cell: func(l doctor.Lane) string {
			if !l.Compared {
				return "?"
			}
			return itoa(l.Lost)
		}},
		{title: "RELAY", cell: func(l doctor.Lane) string {
			if l.Paused {
				return "paused"
			}
			return cmp.Or(l.Relay, "none")
		}, cut: 24},
		number("WORKERS", func(l doctor.Lane) int64 { return int64(l.LiveWorkers) }),
	}
}

// member is a line about a relay or a worker.
type member struct {
	kind string
	doctor.Member
}

func memberLines(r *doctor.Report) (all []member) {
	for _, m := range r.Relays {
		all = append(all, member{"relay", m})
	}
	for _, m := range r.Workers {
		all = append(all, member{"worker", m})
	}
	return all
}

func memberColumns() []column[member] {
	return []column[member]{
		{title: "WHAT", cell: func(m member) string { return m.kind }},
		{title: "NAME", cell: func(m member) string { return m.Name }, cut: 48},
		{title: "PID", cell: func(m member) string { return fmt.Sprint(m.PID) }},
		{title: "VERSION", cell: func(m member) string { return m.Version }, cut: 16},
		{title: "HEARD OF", cell: func(m member) string { return ago(time.Duration(m.SilentMS)*time.Millisecond) + " ago" }},
		{title: "HOLDS", cell: func(m member) string {
			if m.kind == "relay" {
				return fmt.Sprintf("%d lanes", m.Lanes)
			}
			return fmt.Sprintf("%d leases", m.Leases)
		}},
		{title: "LONGEST", cell: func(m member) string {
			if m.Leases == 0 {
				return ""
			}
			return ago(time.Duration(m.OldestMS)*time.Millisecond) + " (task " + m.OldestID.String() + ")"
		}},
	}
}

// describeFindings writes the problems first.
func describeFindings(w io.Writer, r *doctor.Report) {
	if len(r.Findings) == 0 {
		fmt.Fprintln(w, "Nothing is wrong.")
		return
	}
	all := slices.Clone(r.Findings)
	slices.SortStableFunc(all, func(a, b doctor.Finding) int { return -cmp.Compare(a.Level, b.Level) })
	for _, f := range all {
		fmt.Fprintf(w, "%-8s%s: %s\n", strings.ToUpper(f.Level), f.Where, oneLine(f.What))
		if len(f.IDs) > 0 {
			var ids []string
			for _, id := range f.IDs {
				ids = append(ids, id.String())
			}
			fmt.Fprintf(w, "        tasks:     %s\n", strings.Join(ids, " "))
		}
		fmt.Fprintf(w, "        the relay: %s\n        you:       %s\n", oneLine(f.Relay), oneLine(f.You))
	}
}
