package model

// A letterJob is a dead row that a relay has read, until its letter is out and written down.
type letterJob struct {
	task, uid, generation int
	seq                   int  // 0: not published yet
	moved                 bool // its row was not dead any more
}

func (d *database) letterDue() (found *row) {
	d.each(func(r *row) {
		if found == nil && r.status == dead && !r.lettered {
			found = r
		}
	})
	return found
}

func (w *world) publishLetter(j *letterJob) {
	w.stream.letterSeq++
	j.seq = w.stream.letterSeq
	w.stream.letters[j.uid] = letter{j.seq, j.generation}
}

// markLetter is lettersOutSQL.
func (w *world) markLetter(r *relay) {
	j := r.letter
	t := w.db.rows[j.task]
	if t == nil || t.status != dead || t.generation != j.generation && !w.without.generation {
		j.moved = true
		return
	}
	t.lettered = true
	w.db.wrote()
	r.letter = nil
}

func (w *world) retract(r *relay) {
	j := r.letter
	if l, ok := w.stream.letters[j.uid]; ok && l.seq == j.seq {
		delete(w.stream.letters, j.uid)
	}
	r.letter = nil
}

// purge is purgeLetters.
func (w *world) purge() {
	for uid, below := range w.db.purges {
		if l, ok := w.stream.letters[uid]; ok && l.generation < below {
			delete(w.stream.letters, uid)
		}
	}
	clear(w.db.purges)
}
