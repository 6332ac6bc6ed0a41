package command

import (
	"time"

	"github.com/taskrelay/taskrelay/internal/text"
)

// foreignMessage takes a message of another installation: it is not ours to answer, but must not come back at once.
func (w *Worker) foreignMessage(a *attempt) {
	w.stats.Foreign.Add(1)
	theirs := header(a.msg.Header, "Task-Installation")
	err := errForeignMessage{theirs: text.Storable(theirs, 64), ours: w.installation}
	w.health.set("foreign messages", err, w.now()+time.Minute)
	w.complain("foreign "+theirs, func() {
		w.log.Error().Err(err).Str("subject", a.msg.Subject).Msg("message of another installation left alone")
	})
	a.nak(unknownNak)
}

type errForeignMessage struct{ theirs, ours string }

func (e errForeignMessage) Error() string {
	return "the stream carries messages of installation " + e.theirs + ", this database is " + e.ours +
		": use another NATS_URL or set NAMESPACE for one of them"
}
